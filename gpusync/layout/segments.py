"""Pieces as segments: which runs of a tensor's bytes go where in a storage, as the device operations take them.

A segment table's source is the tensor as published, its destination the storage. Runs are as long as the dimensions of
a piece make them, and what was loaded in parts is put together again. Pieces that convert count elements instead of
bytes, as `bind_casts` wants it.

    rows 4..7 of a [8, 6] tensor of bytes, its columns 2..3, packed from byte 100 of their storage:
    src_offset=26 src_stride=6   dst_offset=100 dst_stride=2   rows=4 row_bytes=2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusync.layout.dtypes import element_width
from gpusync.layout.placement import Piece
from gpusync_kernels.segments import SEGMENT, Rows, SegmentTable, single_rows

RUN_BY_RUN = 1 << 14
"""Parts with no more runs than this together are merged run by run, however they were cut."""

Ints = npt.NDArray[np.int64]
Dims = list[tuple[int, int, int]]
"""(size, source stride, destination stride), outermost first."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """All segments of one placement that go to one storage in one way, source and destination numbered 0.

    Without `converts` the table counts bytes, and `dtype` is U8. With it, elements: on the source's side of `dtype`, on
    the destination's of `converts`.
    """

    param: str
    dtype: str
    converts: str | None
    table: SegmentTable


def segment_groups(pieces: Iterable[Piece]) -> list[SegmentGroup]:
    """The pieces of one tensor as segments, in the order of the first piece of each group."""
    grouped: dict[tuple[str, str, str | None], list[Piece]] = {}
    for piece in pieces:
        # Bytes that move unchanged are bytes, whatever they were called on the way.
        key = (piece.param, "U8" if piece.converts is None else piece.dtype, piece.converts)
        grouped.setdefault(key, []).append(piece)
    return [
        SegmentGroup(param, dtype, converts, SegmentTable(_segments_of(group)))
        for (param, dtype, converts), group in grouped.items()
    ]


def piece_segments(piece: Piece) -> Rows:
    """The segments of one piece: bytes, or elements where it converts."""
    if piece.numel == 0:
        return np.empty(0, SEGMENT)
    unit = 1 if piece.converts is not None else element_width(piece.dtype)
    run, (count, src_stride, dst_stride), rest = _run_rows_rest(piece)
    src, dst = _starts(rest)
    rows = np.zeros(len(src), SEGMENT)
    rows["src_offset"], rows["dst_offset"] = (src + piece.src_offset) * unit, (dst + piece.dst_offset) * unit
    rows["src_stride"], rows["dst_stride"] = src_stride * unit, dst_stride * unit
    rows["rows"], rows["row_bytes"] = count, run * unit
    return rows


def count_segments(piece: Piece) -> int:
    """How many `piece_segments` makes, without making them."""
    return 0 if piece.numel == 0 else math.prod(size for size, _, _ in _run_rows_rest(piece)[2])


def merge_segments(rows: Rows) -> Rows:
    """The same bytes in fewer segments, in the order of the destination: neighbours joined while there are any."""
    merged = _join_segments(rows)
    if len(merged) > 1 and int(merged["rows"].sum()) <= RUN_BY_RUN:
        strided = _strided(_join_segments(single_rows(merged)))
        merged = min(merged, strided, key=lambda each: (len(each), int(each["rows"].sum())))
    single = merged["rows"] == 1
    for stride in ("src_stride", "dst_stride"):
        merged[stride] = np.where(single, merged["row_bytes"], merged[stride])
    return merged[np.argsort(merged["dst_offset"], kind="stable")]


def destination_runs(pieces: Iterable[Piece]) -> Ints:
    """The bytes of one storage that the pieces write: int64 [runs, 2] of from and to, ascending by from.

    Runs of different pieces may touch and overlap.
    """
    runs = [np.empty((0, 2), np.int64)]
    for piece in pieces:
        if piece.numel == 0:
            continue
        width = element_width(piece.dst_dtype)
        run, rest = _run_rest([(size, step, step) for size, step in zip(piece.size, piece.dst_stride, strict=True)])
        start = (_starts(rest)[1] + piece.dst_offset) * width
        runs.append(np.stack([start, start + run * width], axis=1))
    every = np.concatenate(runs)
    return every[np.argsort(every[:, 0], kind="stable")]


def _segments_of(pieces: Sequence[Piece]) -> Rows:
    tables = [piece_segments(piece) for piece in pieces]
    return tables[0] if len(tables) == 1 else merge_segments(np.concatenate(tables))


def _run_rows_rest(piece: Piece) -> tuple[int, tuple[int, int, int], Dims]:
    """Elements of a run, the dimension that becomes rows, and the others. Rows are the longest that do not overlap."""
    run, rest = _run_rest(list(zip(piece.size, piece.src_stride, piece.dst_stride, strict=True)))
    apart = [d for d, (_, src, dst) in enumerate(rest) if min(src, dst) >= run]
    if not apart:
        return run, (1, run, run), rest
    rows = max(apart, key=lambda d: rest[d][0])
    return run, rest[rows], rest[:rows] + rest[rows + 1 :]


def _run_rest(dims: Dims) -> tuple[int, Dims]:
    """Elements that run on on both sides, and the dimensions left, joined where they can be, outermost first."""
    joined: Dims = []
    for size, src, dst in sorted((d for d in dims if d[0] != 1), key=lambda d: (d[2], d[1]), reverse=True):
        if joined and joined[-1][1:] == (size * src, size * dst):
            joined[-1] = (joined[-1][0] * size, src, dst)
        else:
            joined.append((size, src, dst))
    return (joined[-1][0], joined[:-1]) if joined and joined[-1][1:] == (1, 1) else (1, joined)


def _starts(dims: Dims) -> tuple[Ints, Ints]:
    """Where every combination of the dimensions begins, source and destination, outermost dimension slowest."""
    src = dst = np.zeros(1, np.int64)
    for size, src_stride, dst_stride in dims:
        steps = np.arange(size, dtype=np.int64)
        src = (src[:, None] + steps * src_stride).reshape(-1)
        dst = (dst[:, None] + steps * dst_stride).reshape(-1)
    return src, dst


def _join_segments(rows: Rows) -> Rows:
    """Segments joined whole, into longer rows or into more rows. A single row has no strides."""
    while True:
        before = len(rows)
        rows = _join(_normal(rows), grown="row_bytes", same=("rows", "src_stride", "dst_stride"))
        rows = _join(_normal(rows), grown="rows", same=("row_bytes", "src_stride", "dst_stride"))
        if len(rows) == before:
            return _normal(rows)


def _strided(runs: Rows) -> Rows:
    """Single runs as segments: in the order of the destination, those of one length and one distance together."""
    runs = runs[np.argsort(runs["dst_offset"], kind="stable")]
    src_step, dst_step = np.diff(runs["src_offset"]), np.diff(runs["dst_offset"])
    nbytes = runs["row_bytes"]
    links = (nbytes[1:] == nbytes[:-1]) & (np.minimum(src_step, dst_step) >= nbytes[:-1])
    steps = list(zip(links.tolist(), src_step.tolist(), dst_step.tolist(), strict=True))
    segments, first = [], 0
    while first < len(runs):
        last = first
        while last < len(steps) and steps[last][0] and steps[last] == steps[first]:
            last += 1
        segment = runs[first].copy()
        segment["rows"] = last - first + 1
        if last > first:
            _, segment["src_stride"], segment["dst_stride"] = steps[first]
        segments.append(segment)
        first = last + 1
    return np.array(segments, SEGMENT)


def _normal(rows: Rows) -> Rows:
    """Rows that lie back to back become one row, and a single row has no stride, so that it may join any other."""
    rows = rows.copy()
    whole = (rows["src_stride"] == rows["row_bytes"]) & (rows["dst_stride"] == rows["row_bytes"])
    rows["row_bytes"] = np.where(whole, rows["rows"] * rows["row_bytes"], rows["row_bytes"])
    rows["rows"] = np.where(whole, 1, rows["rows"])
    for stride in ("src_stride", "dst_stride"):
        rows[stride] = np.where(rows["rows"] == 1, 0, rows[stride])
    return rows


def _join(rows: Rows, *, grown: str, same: Sequence[str]) -> Rows:
    """Segments alike in `same` of which each begins where the one before ends become one, with their `grown` summed."""
    rows = rows[np.lexsort((rows["dst_offset"], *(rows[name] for name in same)))]
    joins = np.ones(max(len(rows) - 1, 0), bool)
    for name in same:
        joins &= rows[name][1:] == rows[name][:-1]
    for side in ("src", "dst"):
        reach = rows["row_bytes"] if grown == "row_bytes" else rows["rows"] * rows[f"{side}_stride"]
        joins &= np.diff(rows[f"{side}_offset"]) == reach[:-1]
    first = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), ~joins]))
    if len(first) == len(rows):
        return rows
    merged = rows[first].copy()
    merged[grown] = np.add.reduceat(rows[grown], first)
    # A source that is read more than once could make rows so long that they overlap there.
    if ((merged["rows"] > 1) & (np.minimum(merged["src_stride"], merged["dst_stride"]) < merged["row_bytes"])).any():
        return rows
    return merged
