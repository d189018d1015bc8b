"""Windows: the pieces in which tensors are decoded and encoded, so that memory never grows with a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gpusync.codec.payload import U8, Payload
from gpusync.errors import NOWHERE, LayoutError, Where

# Two windows and a decoder's scratch stay in a core's L2, so that xor and hash find the bytes in cache.
WINDOW_BYTES = 1 << 20

# What an encoder takes as a tensor's bytes: all of them, something that can be read, or windows in order.
Windows = U8 | Payload | Iterable[U8]


class WindowOrder:
    """Guards a decoder's contract: windows come ascending, gapless, from 0, in whole units, to the tensor's end."""

    def __init__(self, *, nbytes: int, unit_bytes: int = 1, where: Where) -> None:
        self.nbytes = nbytes
        self.unit_bytes = unit_bytes
        self.where = where
        self.next_offset = 0

    def advance(self, window: U8, offset: int) -> None:
        if offset != self.next_offset:
            raise LayoutError("window out of order", where=self.where, expected=self.next_offset, found=offset)
        if offset + len(window) > self.nbytes:
            raise LayoutError(
                "window ends behind the tensor", where=self.where, expected=self.nbytes, found=offset + len(window)
            )
        if len(window) % self.unit_bytes:
            raise LayoutError(
                "window cuts an element", where=self.where, expected=f"a multiple of {self.unit_bytes}",
                found=len(window),
            )  # fmt: skip
        self.next_offset = offset + len(window)

    def finish(self) -> None:
        if self.next_offset != self.nbytes:
            raise LayoutError(
                "windows end before the tensor does", where=self.where, expected=self.nbytes, found=self.next_offset
            )


def pieces(window: U8, offset: int, *, piece_bytes: int = WINDOW_BYTES) -> Iterator[tuple[U8, int]]:
    """Cuts a window of any length into (piece, offset), so that scratch is bounded whatever the caller hands in."""
    for start in range(0, len(window), piece_bytes):
        yield window[start : start + piece_bytes], offset + start


def total_bytes(data: Windows, *, nbytes: int | None, where: Where = NOWHERE) -> int:
    """The tensor's size: that of the data, or `nbytes` for an iterator, which cannot tell. They must agree."""
    known = data.nbytes if isinstance(data, (np.ndarray, Payload)) else None
    if known is None:
        known = nbytes
    if known is None:
        raise LayoutError("windows of unknown total size; `nbytes` is required", where=where)
    if nbytes not in (None, known):
        raise LayoutError("size of the data differs from the tensor's", where=where, expected=nbytes, found=known)
    return known


def iterate_windows(data: Windows, *, window_bytes: int = WINDOW_BYTES) -> Iterator[U8]:
    """`data` window by window. What is yielded is valid until the next step only."""
    if isinstance(data, np.ndarray):
        flat = data.reshape(-1)
        for start in range(0, len(flat), window_bytes):
            yield flat[start : start + window_bytes]
    elif isinstance(data, Payload):
        buffer = np.empty(min(window_bytes, data.nbytes), np.uint8)
        for start in range(0, data.nbytes, window_bytes):
            window = buffer[: min(window_bytes, data.nbytes - start)]
            data.read_into(start, memoryview(window))
            yield window
    else:
        yield from data


def paired_windows(
    old: Windows, new: Windows, *, nbytes: int, window_bytes: int = WINDOW_BYTES, where: Where = NOWHERE
) -> Iterator[tuple[int, U8, U8]]:
    """(offset, old, new) over both at once; windows of two iterators must be cut alike."""
    offset = 0
    olds, news = (iterate_windows(data, window_bytes=window_bytes) for data in (old, new))
    for old_window in olds:
        new_window = next(news, None)
        if new_window is None or len(new_window) != len(old_window):
            found = 0 if new_window is None else len(new_window)
            raise LayoutError("old and new windows differ", where=where, expected=len(old_window), found=found)
        yield offset, old_window, new_window
        offset += len(old_window)
    if next(news, None) is not None or offset != nbytes:
        raise LayoutError("windows do not make up the tensor", where=where, expected=nbytes, found=offset)
