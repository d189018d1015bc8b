"""Pieces as segments: which runs of a tensor's bytes go where in a storage, as the device operations take them.

A segment is `rows` runs of `row_bytes` bytes. Run r begins at byte `src_offset + r * src_stride` of the tensor and at
byte `dst_offset + r * dst_stride` of the storage. The columns, and their meaning, are those of the segment tables of
`gpusync_kernels`. Pieces that convert count elements instead of bytes, each side its own: see `SegmentGroup`.

    a [4, 6] tensor of bytes whose columns 2..3 this rank holds, packed, from byte 100 of its storage:
    src_offset=2 src_stride=6   dst_offset=100 dst_stride=2   rows=4 row_bytes=2

Runs are as long as they can be: where two segments touch on both sides they are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.layout.dtypes import element_width
from gpusync.layout.placement import Piece

FIELDS = ("dst", "dst_offset", "dst_stride", "src", "src_offset", "src_stride", "rows", "row_bytes")
SEGMENT = np.dtype([(name, "<i8") for name in FIELDS])

Rows = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Dims = list[tuple[int, int, int]]
"""(size, source stride, destination stride), outermost first."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """All segments of one placement that go to one storage in one way.

    `rows` has dtype SEGMENT; its columns `src` and `dst` are 0, to be filled with the caller's numbers. Without
    `converts` offsets, strides and `row_bytes` count bytes. With it they count elements: on the source's side of
    `dtype`, on the destination's of `converts`.
    """

    param: str
    dtype: str
    converts: str | None
    rows: Rows


def segment_groups(pieces: Iterable[Piece]) -> list[SegmentGroup]:
    """The pieces of one tensor as segments, in the order of the first piece of each group."""
    grouped: dict[tuple[str, str, str | None], list[Piece]] = {}
    for piece in pieces:
        # Bytes that move unchanged are bytes, whatever they were called on the way.
        key = (piece.param, "U8" if piece.converts is None else piece.dtype, piece.converts)
        grouped.setdefault(key, []).append(piece)
    return [
        SegmentGroup(param, dtype, converts, merge_segments(np.concatenate([piece_segments(p) for p in group])))
        for (param, dtype, converts), group in grouped.items()
    ]


def numbered(groups: Iterable[SegmentGroup], *, src: int, dst: Mapping[str, int]) -> Rows:
    """One table of the groups' segments, with the source's number and, by name, those of the storages."""
    tables: list[Rows] = [np.empty(0, SEGMENT)]
    for group in groups:
        rows = group.rows.copy()
        rows["src"], rows["dst"] = src, dst[group.param]
        tables.append(rows)
    return np.concatenate(tables)


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
    while True:
        before = len(rows)
        rows = _join(_normal(rows), grown="row_bytes", same=("rows", "src_stride", "dst_stride"))
        rows = _join(_normal(rows), grown="rows", same=("row_bytes", "src_stride", "dst_stride"))
        if len(rows) == before:
            rows = _normal(rows)
            single = rows["rows"] == 1
            for stride in ("src_stride", "dst_stride"):
                rows[stride] = np.where(single, rows["row_bytes"], rows[stride])
            return rows[np.argsort(rows["dst_offset"], kind="stable")]


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
