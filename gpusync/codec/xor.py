"""Slime's `xor`: `new ^ old`, byte by byte, as one zstd frame whose content is as long as the tensor.

Applying it twice restores the old bytes: a decoder belongs to one pass over one tensor.
"""

from __future__ import annotations

import numpy as np
import zstandard

from gpusync.codec.frames import FrameReader
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import WINDOW_BYTES, WindowOrder, Windows, paired_windows, pieces, total_bytes
from gpusync.errors import NOWHERE, Where


class XorDecoder:
    """Changes old bytes into new ones, window by window. Holds one window of at most `WINDOW_BYTES`."""

    needs_base = True
    unit_bytes = 1

    def __init__(self, payload: Payload, *, nbytes: int, where: Where = NOWHERE) -> None:
        self._frame = FrameReader(payload, content_size=nbytes, where=where)
        self._order = WindowOrder(nbytes=nbytes, where=where)
        self._scratch = np.empty(0, np.uint8)

    def read(self, window: U8, offset: int) -> None:
        """Fills `window` with the difference itself, in place of `apply`: windows in order, as there."""
        self._order.advance(window, offset)
        for piece, _ in pieces(window, offset):
            self._frame.read_into(piece)

    def apply(self, window: U8, offset: int) -> None:
        self._order.advance(window, offset)
        for piece, _ in pieces(window, offset):
            if len(self._scratch) < len(piece):
                self._scratch = np.empty(len(piece), np.uint8)
            changes = self._scratch[: len(piece)]
            self._frame.read_into(changes)
            np.bitwise_xor(piece, changes, out=piece)

    def finish(self) -> None:
        self._order.finish()
        self._frame.finish()


def encode_xor(
    old: Windows,
    new: Windows,
    *,
    nbytes: int | None = None,
    level: int = 1,
    window_bytes: int = WINDOW_BYTES,
    where: Where = NOWHERE,
) -> bytes | None:
    """The payload that turns `old` into `new`, or None if they are equal.

    Takes u8 arrays, payload-like sources, or iterators of windows cut alike (then `nbytes` is required). Holds two
    windows and the compressed bytes. Level 1 is the smallest for sparse changes, not only the fastest.
    """
    nbytes = total_bytes(new, nbytes=nbytes, where=where)
    compressor: zstandard.ZstdCompressionObj | None = None
    scratch = np.empty(0, np.uint8)
    chunks: list[bytes] = []
    for offset, before, after in paired_windows(old, new, nbytes=nbytes, window_bytes=window_bytes, where=where):
        if len(scratch) < len(before):
            scratch = np.empty(len(before), np.uint8)
        changes = np.bitwise_xor(before, after, out=scratch[: len(before)])
        if compressor is None:
            # Equal tensors are the common case and cost a compare; the zeros passed by are made up for afterwards.
            if not changes.any():
                continue
            compressor = zstandard.ZstdCompressor(level=level).compressobj(size=nbytes)
            chunks.extend(_compress_zeros(compressor, offset))
        chunks.append(compressor.compress(as_bytes(changes)))
    if compressor is None:
        return None
    chunks.append(compressor.flush())
    return b"".join(chunks)


def _compress_zeros(compressor: zstandard.ZstdCompressionObj, count: int) -> list[bytes]:
    zeros = memoryview(bytes(min(count, WINDOW_BYTES)))
    return [compressor.compress(zeros[: count - start]) for start in range(0, count, WINDOW_BYTES)]
