"""One zstd frame, decoded into buffers that the caller owns, from bytes that are fetched in bounded chunks.

The frame must declare exactly the content size that its reader expects, need no dictionary, and fill its payload to the
last byte. Nothing is allocated before its header has been checked.
"""

from __future__ import annotations

import numpy as np
import zstandard

from gpusync.codec.frame_header import (
    MAX_FRAME_HEADER_BYTES,
    MAX_WINDOW_SIZE,
    ZSTD_MAGIC,
    BlockWalker,
    FrameInfo,
    check_frame,
    frame_info,
)
from gpusync.codec.payload import U8, Payload, as_bytes, read_head
from gpusync.errors import NOWHERE, PayloadError, Where

CHUNK_BYTES = 256 << 10
_SKIP_BYTES = 256 << 10

__all__ = ["CHUNK_BYTES", "FrameInfo", "FrameReader", "check_frame", "frame_info", "read_frame_info"]


def read_frame_info(payload: Payload, *, where: Where = NOWHERE) -> FrameInfo:
    """The header of the frame that starts the payload."""
    return frame_info(read_head(payload, MAX_FRAME_HEADER_BYTES), where=where)


class FrameReader:
    """Reads the one frame of a payload from front to back. Releases the interpreter lock while it decodes.

    Raises `PayloadError` as soon as the frame is seen to be short, long, damaged or followed by anything.
    """

    def __init__(self, payload: Payload, *, content_size: int, where: Where = NOWHERE) -> None:
        info = read_frame_info(payload, where=where)
        check_frame(info, content_size=content_size, where=where)
        self.content_size = content_size
        self.position = 0
        self._where = where
        self._input = _FrameInput(payload, info, where)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_SIZE)
        self._reader = decompressor.stream_reader(self._input, read_size=CHUNK_BYTES)  # type: ignore[arg-type]

    def read_into(self, buffer: U8) -> None:
        """Fills the contiguous `buffer` with the next decoded bytes."""
        if self.position + len(buffer) > self.content_size:
            raise PayloadError(
                "payload decodes to less than its tensor needs",
                where=self._where,
                expected=self.position + len(buffer),
                found=self.content_size,
            )
        got = self._decode(buffer)
        self.position += got
        if got != len(buffer):
            self._refuse_short()

    def skip(self, nbytes: int) -> None:
        """Decodes and drops `nbytes` bytes."""
        scratch = np.empty(min(nbytes, _SKIP_BYTES), np.uint8)
        for start in range(0, nbytes, _SKIP_BYTES):
            self.read_into(scratch[: min(_SKIP_BYTES, nbytes - start)])

    def finish(self) -> None:
        """Checks that all was read, that the content checksum holds, and that the payload ends with the frame."""
        if self.position != self.content_size:
            raise PayloadError(
                "payload decodes to more than was read", where=self._where, expected=self.position,
                found=self.content_size,
            )  # fmt: skip
        # One byte more makes libzstd consume what is left of the frame: empty blocks and the content checksum.
        if self._decode(np.empty(1, np.uint8)):
            raise PayloadError(
                "payload decodes to more than the declared size", where=self._where, expected=self.content_size,
                found=f"at least {self.content_size + 1}",
            )  # fmt: skip
        if not self._input.at_frame_end:
            self._refuse_short()

    def _decode(self, buffer: U8) -> int:
        if not len(buffer):
            return 0
        try:
            return self._reader.readinto(as_bytes(buffer))
        except zstandard.ZstdError as error:
            raise PayloadError(f"zstd frame is damaged ({error})", where=self._where) from error

    def _refuse_short(self) -> None:
        raise PayloadError(
            "zstd frame ends before its declared size", where=self._where, expected=self.content_size,
            found=self.position,
        )  # fmt: skip


class _FrameInput:
    """The file object that libzstd's reader pulls from: bounded chunks, one buffer, and the walk over the blocks."""

    def __init__(self, payload: Payload, info: FrameInfo, where: Where) -> None:
        self._payload = payload
        self._where = where
        self._walker = BlockWalker(info, where=where)
        self._offset = 0
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, payload.nbytes)))

    @property
    def at_frame_end(self) -> bool:
        return self._walker.end == self._offset == self._payload.nbytes

    def read(self, size: int) -> memoryview:
        """The next chunk, valid until the next call: the reader asks again only when it has used all of it."""
        count = min(size, len(self._buffer), self._payload.nbytes - self._offset)
        chunk = self._buffer[:count]
        if count == 0:
            return chunk
        self._payload.read_into(self._offset, chunk)
        self._walker.feed(chunk, self._offset)
        self._check_end(chunk)
        self._offset += count
        return chunk

    def _check_end(self, chunk: memoryview) -> None:
        end, nbytes = self._walker.end, self._payload.nbytes
        stop = self._offset + len(chunk)
        if (end is None and stop == nbytes) or (end is not None and end > nbytes):
            raise PayloadError(
                "zstd frame is cut", where=self._where, expected=end or f"more than {nbytes}", found=nbytes
            )
        if end is not None and end < nbytes:
            follows = bytes(chunk[max(end - self._offset, 0) :][:4])
            what = "a second zstd frame follows the first" if follows == ZSTD_MAGIC else "bytes follow the zstd frame"
            raise PayloadError(what, where=self._where, expected=end, found=nbytes)
