"""The bytes of one rank's segments where a digest needs them: in buffers, or made when they are asked for.

Whoever reads does so in windows. A window of buffers is as large as what is read; a supply says how much it can have
at once. So a tensor goes through a scratch that is smaller than it, and nothing else is different.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpusync.digest.intervals import Ints, by_position, span_stops
from gpusync.errors import LayoutError
from gpusync_kernels.buffers import Buffer, device_of
from gpusync_kernels.segments import Rows, clip_source
from gpusync_kernels.xxh3 import BLOCK_BYTES

CUT_BYTES = 16
SMALLEST_WINDOW_BYTES = BLOCK_BYTES  # a block of an XXH3 digest is never cut

_DESTINATION = ("dst", "dst_offset", "dst_stride")
_KEPT = ("src", "src_offset", "rows", "row_bytes")


class Supply(Protocol):
    """Bytes that are made when they are asked for, on the rank that asks: no collective, called from one thread.

    The bytes of a tensor are asked for in ascending windows, once to make its digest. What other ranks have as well is
    asked for once to be compared; not again where a rank has the whole tensor and so do they, but again on the one rank
    of those alike whose bytes make the digest. Two copies that differ are asked for some times more, to find the byte.

    Rows are cut at multiples of 16 bytes, counted in their tensor or among the bytes that are compared: in no element
    where the table's rows are whole ones.
    """

    @property
    def device(self) -> Any:
        """The `torch.device` on which the bytes lie, None for host memory."""
        ...

    @property
    def window_bytes(self) -> int:
        """How many bytes are asked for at most at once: `SMALLEST_WINDOW_BYTES` or more, always the same."""
        ...

    def take(self, rows: Rows) -> tuple[Rows, Sequence[Buffer]]:
        """The bytes of these segments: the same rows in the same order, with the destination side where they now lie.

        `rows` are segments of the shards' table, cut: source t is tensor t, the destination side is as the table says.
        What is returned is read until the next call. What this raises, the other ranks learn.
        """
        ...


class Buffers:
    """What lies in buffers, as a supply."""

    window_bytes = sys.maxsize

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers, self.device = buffers, device_of(buffers)

    def take(self, rows: Rows) -> tuple[Rows, Sequence[Buffer]]:
        return rows, self.buffers


@dataclass(frozen=True, slots=True)
class Window:
    """`rows`: what was asked for, destinations in `buffers`; to be used before the next window is asked for.

    `places`: the same rows with destinations as in the layers of their source.
    """

    rows: Rows
    buffers: Sequence[Buffer]
    places: Rows

    def find(self, singles: Rows) -> Rows:
        """Those of `singles` (rows of a layer's segments, none in two windows) that are here, where they lie here."""
        order = np.argsort(self.places["dst_offset"])
        places = self.places[order]
        at = np.searchsorted(places["dst_offset"], singles["dst_offset"], "right") - 1
        singles, at = singles[at >= 0], at[at >= 0]
        row, byte = np.divmod(singles["dst_offset"] - places["dst_offset"][at], places["dst_stride"][at])
        here = (row < places["rows"][at]) & (byte < places["row_bytes"][at])
        found, lying = singles[here], self.rows[order[at[here]]]
        found["dst"], found["dst_stride"] = lying["dst"], found["row_bytes"]
        found["dst_offset"] = lying["dst_offset"] + row[here] * lying["dst_stride"] + byte[here]
        return found


class Source:
    """What a rank has, in layers. Their destination side is a place that only this class knows: `dst` the number of a
    segment, `dst_offset` its bytes counted as in the tensor, one segment's after another's. Parts of these rows, with
    whatever source side, can be read; rows must not have been merged.
    """

    def __init__(self, supply: Supply, layers: Sequence[Rows]) -> None:
        self.supply, self.device, self.window_bytes = supply, supply.device, supply.window_bytes
        if self.window_bytes < SMALLEST_WINDOW_BYTES:
            raise LayoutError(
                "a supply has too small a window", expected=f"{SMALLEST_WINDOW_BYTES} bytes", found=self.window_bytes
            )
        self._segments = np.concatenate(layers)
        spans = span_stops(self._segments) - self._segments["src_offset"]
        self._starts = np.cumsum(spans) - spans
        rows = self._segments.copy()
        rows["dst"], rows["dst_offset"], rows["dst_stride"] = np.arange(len(rows)), self._starts, rows["src_stride"]
        self.layers: list[Rows] = np.split(rows, np.cumsum([len(each) for each in layers])[:-1])

    def windows(self, rows: Rows) -> Iterator[Window]:
        """All of `rows`, which have no byte of their sources twice, in windows by source and position."""
        for places in cut_windows(rows, self.window_bytes):
            asked = self._asked(places)
            found, buffers = self.supply.take(asked)
            _check_found(asked, found)
            lying = places.copy()
            for name in _DESTINATION:
                lying[name] = found[name]
            yield Window(lying, buffers, places)

    def positions(self, rows: Rows) -> Ints:
        """Where in its tensor each of these parts of a layer begins."""
        positions: Ints = self._asked(rows)["src_offset"]
        return positions

    def _asked(self, places: Rows) -> Rows:
        """The same bytes as parts of the shards' table."""
        segments = self._segments[places["dst"]]
        row, byte = np.divmod(places["dst_offset"] - self._starts[places["dst"]], segments["src_stride"])
        step = np.where(places["rows"] > 1, places["dst_stride"] // segments["src_stride"], 1)
        asked: Rows = places.copy()
        for side in ("dst", "src"):
            asked[side] = segments[side]
            asked[f"{side}_offset"] = segments[f"{side}_offset"] + row * segments[f"{side}_stride"] + byte
            asked[f"{side}_stride"] = step * segments[f"{side}_stride"]
        return asked


def cut_windows(rows: Rows, window_bytes: int) -> Iterator[Rows]:
    """`rows` in parts of at most `window_bytes`, by source and position; a source is cut at multiples of 1,024.

    No source has a byte twice, so that 1,024 of its bytes are never too many.
    """
    if _nbytes(rows) <= window_bytes:
        if len(rows):
            yield rows
        return
    rows = by_position(rows)
    starts = np.append(np.flatnonzero(np.diff(rows["src"], prepend=-1)), len(rows))
    reached = np.append(0, np.cumsum(rows["rows"] * rows["row_bytes"])[starts[1:] - 1])
    part: list[Rows] = []
    room, source = window_bytes, 0
    while source < len(starts) - 1:
        stop = int(np.searchsorted(reached, reached[source] + room, "right")) - 1
        if stop > source:
            part.append(rows[starts[source] : starts[stop]])
            room -= int(reached[stop] - reached[source])
            source = stop
        elif part:
            yield np.concatenate(part)
            part, room = [], window_bytes
        else:
            *windows, rest = _cut_source(rows[starts[source] : starts[source + 1]], window_bytes)
            yield from windows
            part, room, source = [rest], window_bytes - _nbytes(rest), source + 1
    yield np.concatenate(part)


def _cut_source(rows: Rows, window_bytes: int) -> Iterator[Rows]:
    """One source that is larger than a window; what comes last may be smaller."""
    first, left, end = 0, _nbytes(rows), int(span_stops(rows).max())
    while left > window_bytes:
        stop = _last_cut(rows, first, end, window_bytes)
        yield _clipped(rows, first, stop)
        left -= held_before(rows, stop) - held_before(rows, first)
        first = stop
    yield _clipped(rows, first, end)


def _last_cut(rows: Rows, first: int, end: int, window_bytes: int) -> int:
    """The last multiple of 1,024 up to which, from `first` on, there are no more bytes than fit: short of `end`."""
    limit = held_before(rows, first) + window_bytes
    block, step = (first + window_bytes) // BLOCK_BYTES, 1
    while _fits(rows, block + step, end, limit):
        block, step = block + step, step * 2
    while step > 1:
        step //= 2
        block += step if _fits(rows, block + step, end, limit) else 0
    return block * BLOCK_BYTES


def _fits(rows: Rows, block: int, end: int, limit: int) -> bool:
    return block * BLOCK_BYTES < end and held_before(rows, block * BLOCK_BYTES) <= limit


def _nbytes(rows: Rows) -> int:
    return int((rows["rows"] * rows["row_bytes"]).sum())


def held_before(rows: Rows, position: int) -> int:
    """How many bytes of one source these segments hold before a position.

    Rows of 4 bytes at 10, 20 and 30, before 22: 6
    """
    row, byte = np.divmod(np.maximum(position - rows["src_offset"], 0), np.maximum(rows["src_stride"], 1))
    held = np.where(row < rows["rows"], row * rows["row_bytes"] + np.minimum(byte, rows["row_bytes"]), 0)
    return int(np.where(row < rows["rows"], held, rows["rows"] * rows["row_bytes"]).sum())


def _clipped(rows: Rows, first: int, stop: int) -> Rows:
    return clip_source(rows, np.full(len(rows), first), np.full(len(rows), stop))


def _check_found(asked: Rows, found: Rows) -> None:
    if found is asked:
        return
    if len(found) != len(asked) or any((found[name] != asked[name]).any() for name in _KEPT):
        raise LayoutError(
            "a supply returned other segments than it was asked for", expected=len(asked), found=len(found)
        )
