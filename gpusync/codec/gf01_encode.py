"""Encodes GF01 payloads (layout in `gf01_layout`) in one pass over the tensor, whatever its transform."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import zstandard

from gpusync.codec.gf01_layout import (
    FULL_PLANES,
    MAX_FRAME_LOG2,
    MIN_FRAME_LOG2,
    STEP_PLANES,
    TRANSFORM_NAMES,
    XOR,
    encode_layout,
    padding,
)
from gpusync.codec.payload import U8, as_bytes
from gpusync.codec.windows import WINDOW_BYTES, Windows, iterate_windows, paired_windows, total_bytes
from gpusync.errors import NOWHERE, LayoutError, UnsupportedFormatError, Where
from gpusync_kernels.word_order import to_order, zigzag

FRAME_BYTES = 64 << 10
# Steps take several times the room of a window while they are computed.
_WINDOW_BYTES = WINDOW_BYTES // 4


def encode_gf01(
    old: Windows | None,
    new: Windows,
    *,
    transform: int,
    element_bytes: int,
    float_order: bool,
    frame_bytes: int = FRAME_BYTES,
    level: int = 1,
    nbytes: int | None = None,
    window_bytes: int = _WINDOW_BYTES,
    where: Where = NOWHERE,
) -> bytes | None:
    """The payload of a tensor, or None if `old` is given and equal to `new`.

    Takes what `encode_xor` takes; windows of an iterator must hold whole elements. `old` may be None for full planes
    and full, which do not read it but to see whether anything changed. Holds two windows, two frames for each plane,
    and the compressed bytes.
    """
    nbytes = total_bytes(new, nbytes=nbytes, where=where)
    _check(old, transform, element_bytes, frame_bytes, nbytes, where)
    frames = _FrameWriter(raw_bytes=nbytes, frame_bytes=frame_bytes, level=level)
    planes = element_bytes if transform in (STEP_PLANES, FULL_PLANES) else 1
    changed = old is None
    window_bytes = max(window_bytes - window_bytes % element_bytes, element_bytes)
    for offset, before, after in _windows(old, new, nbytes, window_bytes, where):
        if len(after) % planes:
            found = len(after)
            raise LayoutError("window cuts an element", where=where, expected=f"a multiple of {planes}", found=found)
        raw = after
        if before is not None and (transform in (XOR, STEP_PLANES) or not changed):
            difference = (
                _steps(before, after, element_bytes, float_order) if transform == STEP_PLANES else before ^ after
            )
            changed = changed or bool(difference.any())
            raw = difference if transform in (XOR, STEP_PLANES) else after
        words = raw.reshape(-1, planes)
        for plane in range(planes):
            frames.put(plane * (nbytes // planes) + offset // planes, np.ascontiguousarray(words[:, plane]))
    if (nbytes and not changed) or (not nbytes and old is not None):
        return None
    return frames.payload(transform=transform, element_bytes=element_bytes, float_order=float_order)


def _steps(before: U8, after: U8, element_bytes: int, float_order: bool) -> U8:
    old, new = (to_order(side.view(f"<u{element_bytes}"), int(float_order)) for side in (before, after))
    steps: U8 = zigzag(new - old).view(np.uint8)
    return steps


class _FrameWriter:
    """Takes raw bytes as several ascending streams (one a plane) and compresses each frame once it is full.

    Planes are not multiples of a frame: the frame over a border gets its end before its start.
    """

    def __init__(self, *, raw_bytes: int, frame_bytes: int, level: int) -> None:
        self._raw_bytes = raw_bytes
        self._frame_bytes = frame_bytes
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._open: dict[int, tuple[U8, int]] = {}
        self._stored: list[bytes] = [b""] * -(-raw_bytes // frame_bytes)

    def put(self, raw_offset: int, raw: U8) -> None:
        at = 0
        while at < len(raw):
            frame, inside = divmod(raw_offset + at, self._frame_bytes)
            size = min(self._frame_bytes, self._raw_bytes - frame * self._frame_bytes)
            part = raw[at : at + size - inside]
            at += len(part)
            if len(part) == size:
                self._stored[frame] = self._compressor.compress(as_bytes(part))
            else:
                self._put_part(frame, inside, part, size)

    def payload(self, *, transform: int, element_bytes: int, float_order: bool) -> bytes:
        head = encode_layout(
            transform=transform,
            element_bytes=element_bytes,
            float_order=float_order,
            frame_bytes=self._frame_bytes,
            raw_bytes=self._raw_bytes,
            sizes=[len(frame) for frame in self._stored],
        )
        stored_bytes = sum(map(len, self._stored))
        joined = BytesIO()
        joined.write(head)
        for frame, stored in enumerate(self._stored):
            joined.write(stored)
            self._stored[frame] = b""  # never all of it twice
        joined.write(bytes(padding(stored_bytes)))
        return joined.getvalue()

    def _put_part(self, frame: int, inside: int, part: U8, size: int) -> None:
        buffer, filled = self._open.pop(frame) if frame in self._open else (np.empty(size, np.uint8), 0)
        buffer[inside : inside + len(part)] = part
        filled += len(part)
        if filled == size:
            self._stored[frame] = self._compressor.compress(as_bytes(buffer))
        else:
            self._open[frame] = (buffer, filled)


def _windows(
    old: Windows | None, new: Windows, nbytes: int, window_bytes: int, where: Where
) -> Iterator[tuple[int, U8 | None, U8]]:
    if old is not None:
        yield from paired_windows(old, new, nbytes=nbytes, window_bytes=window_bytes, where=where)
        return
    offset = 0
    for window in iterate_windows(new, window_bytes=window_bytes):
        yield offset, None, window
        offset += len(window)
    if offset != nbytes:
        raise LayoutError("windows do not make up the tensor", where=where, expected=nbytes, found=offset)


def _check(
    old: Windows | None, transform: int, element_bytes: int, frame_bytes: int, nbytes: int, where: Where
) -> None:
    if transform not in range(len(TRANSFORM_NAMES)):
        raise UnsupportedFormatError("GF01 transform is not supported", where=where, found=transform)
    if transform in (XOR, STEP_PLANES) and old is None:
        raise LayoutError(f"GF01 {TRANSFORM_NAMES[transform]} without old bytes", where=where)
    if transform == STEP_PLANES and element_bytes not in (1, 2, 4, 8):
        raise LayoutError("GF01 steps between odd elements", where=where, expected="1, 2, 4 or 8", found=element_bytes)
    if frame_bytes not in {1 << log2 for log2 in range(MIN_FRAME_LOG2, MAX_FRAME_LOG2 + 1)}:
        raise LayoutError("frame_bytes is no power of two of 64 KiB to 1 MiB", where=where, found=frame_bytes)
    if element_bytes < 1 or nbytes % element_bytes:
        raise LayoutError(
            "tensor does not hold whole elements", where=where, expected=f"a multiple of {element_bytes}", found=nbytes
        )
