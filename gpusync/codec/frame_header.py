"""zstd frames from the outside: the frame header and the chain of block headers (RFC 8878). Decodes nothing.

`magic 4 = 28 B5 2F FD | descriptor u1 | window u1 (unless single segment) | dictionary id 0,1,2,4 | content size
0,1,2,4,8 | blocks: (header u3: last 1 bit, type 2 bits, size 21 bits; body) … | content checksum u4 (if flagged)`
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusync.errors import NOWHERE, PayloadError, Where

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_FRAME_HEADER_BYTES = 18
# A decoder keeps one window of history; 128 MiB is also what libzstd accepts unless told otherwise.
MAX_WINDOW_SIZE = 128 << 20
# Frames of endless empty blocks would keep a reader busy without giving a byte. No encoder comes near this bound.
_FREE_BLOCKS = 1024
_BYTES_PER_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """What a frame header says. `content_size` is None when the frame does not declare it."""

    content_size: int | None
    dict_id: int
    window_size: int
    has_checksum: bool
    header_bytes: int


def frame_info(head: bytes | memoryview, *, where: Where = NOWHERE) -> FrameInfo:
    """Parses a frame header from the first `MAX_FRAME_HEADER_BYTES` bytes (fewer if the payload is shorter).

    Raises `PayloadError` if this is no zstd frame (a skippable frame is none), or if its header is cut.
    """
    if bytes(head[:4]) != ZSTD_MAGIC:
        raise PayloadError(
            "payload is no zstd frame", where=where, expected=ZSTD_MAGIC.hex(), found=bytes(head[:4]).hex() or "nothing"
        )
    if len(head) < 5:
        raise PayloadError("zstd frame header is cut", where=where, expected="at least 5 bytes", found=len(head))
    descriptor = head[4]
    single_segment = descriptor >> 5 & 1
    dict_bytes = (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    header_bytes = 5 + (1 - single_segment) + dict_bytes + size_bytes
    if len(head) < header_bytes:
        raise PayloadError("zstd frame header is cut", where=where, expected=header_bytes, found=len(head))
    if descriptor & 0x08:
        raise PayloadError("zstd frame header has its reserved bit set", where=where, expected=0, found=1)
    size_offset = header_bytes - size_bytes
    content_size = None
    if size_bytes:
        content_size = int.from_bytes(head[size_offset:header_bytes], "little") + (256 if size_bytes == 2 else 0)
    window_size = content_size or 0
    if not single_segment:
        base = 1 << (10 + (head[5] >> 3))
        window_size = base + (base >> 3) * (head[5] & 7)
    return FrameInfo(
        content_size=content_size,
        dict_id=int.from_bytes(head[size_offset - dict_bytes : size_offset], "little"),
        window_size=window_size,
        has_checksum=bool(descriptor & 0x04),
        header_bytes=header_bytes,
    )


def check_frame(info: FrameInfo, *, content_size: int, where: Where = NOWHERE) -> None:
    """Refuses, before any memory is taken, what would not decode to exactly `content_size` bytes on its own."""
    if info.content_size is None:
        raise PayloadError("zstd frame declares no content size", where=where, expected=content_size, found="none")
    if info.content_size != content_size:
        raise PayloadError(
            "zstd frame declares another content size", where=where, expected=content_size, found=info.content_size
        )
    if info.dict_id:
        raise PayloadError("zstd frame needs a dictionary", where=where, expected="none", found=info.dict_id)
    if info.window_size > MAX_WINDOW_SIZE:
        raise PayloadError(
            "zstd frame needs too large a window", where=where, expected=MAX_WINDOW_SIZE, found=info.window_size
        )


class BlockWalker:
    """Finds a frame's last byte by its block headers, from chunks of any size.

    libzstd's readers stop at the frame's end without telling where in the input that was; a second frame or stray bytes
    behind it would go unnoticed.
    """

    def __init__(self, info: FrameInfo, *, where: Where = NOWHERE) -> None:
        self._where = where
        self._next = info.header_bytes
        self._tail = 4 if info.has_checksum else 0
        self._blocks_left = _FREE_BLOCKS + (info.content_size or 0) // _BYTES_PER_BLOCK
        self._partial = b""
        self.end: int | None = None

    def feed(self, chunk: bytes | memoryview, offset: int) -> None:
        """Takes the frame's bytes [offset, offset + len(chunk)), ascending and gapless. Sets `end` once it is known."""
        at, stop = self._next - offset, len(chunk)
        while self.end is None and at + 3 <= stop:
            header = int.from_bytes(self._partial + chunk[max(at, 0) : at + 3], "little")
            self._partial = b""
            at = self._after_block(header, at)
            if header & 1:
                self.end = offset + at + self._tail
        self._next = offset + at
        if self.end is None and at < stop:
            # The header of three bytes is cut by the chunk's end: keep what is here.
            self._partial += bytes(chunk[max(at, 0) :])

    def _after_block(self, header: int, at: int) -> int:
        kind, size = header >> 1 & 3, header >> 3
        if kind == 3:
            raise PayloadError("zstd frame holds a reserved block type", where=self._where)
        if self._blocks_left == 0:
            raise PayloadError("zstd frame holds more blocks than any encoder writes", where=self._where)
        self._blocks_left -= 1
        return at + 3 + (1 if kind == 1 else size)
