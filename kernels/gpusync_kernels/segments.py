"""The segment table: which bytes of a source go where in a destination. One table drives one launch over many tensors.

A segment is `rows` rows of `row_bytes` bytes. Row r begins at byte `dst_offset + r * dst_stride` of destination
buffer `dst`, and at byte `src_offset + r * src_stride` of source `src`. What a source is depends on the operation: a
buffer (copy, xor, cast) or a whole tensor as published, of which a payload tells positions (overwrite, sparse,
planes) or whose digest is wanted (xxh3, adler32). So one table, destination = live params, source = tensors, serves a
rank's placements throughout. Pure numpy; nothing here knows buffers.

    a [4, 6] tensor of bytes, its columns 2..3 held by this rank, packed, from byte 100 of buffer 0:
    dst=0 dst_offset=100 dst_stride=2   src=0 src_offset=2 src_stride=6   rows=4 row_bytes=2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Ints

FIELDS = ("dst", "dst_offset", "dst_stride", "src", "src_offset", "src_stride", "rows", "row_bytes")
SEGMENT = np.dtype([(name, "<i8") for name in FIELDS])

PACK_ALIGN = 16
PAD_ROWS_FROM = 256  # rows shorter than this are packed without padding, which could outweigh them

Rows = npt.NDArray[Any]
Column = npt.ArrayLike


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """An immutable list of segments, `rows.dtype == SEGMENT`. Rows of one segment do not overlap on either side.

    Destinations of different segments must not overlap either; that is the caller's to know and is not checked.
    """

    rows: Rows

    def __post_init__(self) -> None:
        if self.rows.dtype != SEGMENT or self.rows.ndim != 1:
            raise ValueError(f"segment rows have dtype {self.rows.dtype}, expected {SEGMENT}")
        _check_rows(self.rows)

    @classmethod
    def flat(
        cls, *, dst: Column = 0, dst_offset: Column = 0, src: Column = 0, src_offset: Column = 0, nbytes: Column
    ) -> SegmentTable:
        """Contiguous pieces. Columns are integers or arrays, broadcast against each other."""
        return cls.strided(
            dst=dst,
            dst_offset=dst_offset,
            dst_stride=nbytes,
            src=src,
            src_offset=src_offset,
            src_stride=nbytes,
            rows=1,
            row_bytes=nbytes,
        )

    @classmethod
    def strided(
        cls,
        *,
        dst: Column = 0,
        dst_offset: Column = 0,
        dst_stride: Column,
        src: Column = 0,
        src_offset: Column = 0,
        src_stride: Column,
        rows: Column,
        row_bytes: Column,
    ) -> SegmentTable:
        """Rows of bytes. Columns are integers or arrays, broadcast against each other."""
        columns = (dst, dst_offset, dst_stride, src, src_offset, src_stride, rows, row_bytes)
        values = np.broadcast_arrays(*(np.atleast_1d(np.asarray(column, np.int64)) for column in columns))
        table = np.empty(values[0].shape, SEGMENT)
        for name, value in zip(FIELDS, values, strict=True):
            table[name] = value
        return cls(table)

    @classmethod
    def concat(cls, tables: Sequence[SegmentTable]) -> SegmentTable:
        return cls(np.concatenate([table.rows for table in tables], dtype=SEGMENT) if tables else np.empty(0, SEGMENT))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that the segments hold together."""
        return int((self.rows["rows"] * self.rows["row_bytes"]).sum())

    def swapped(self) -> SegmentTable:
        """Source and destination exchanged: the table that moves everything back."""
        rows = self.rows.copy()
        for field in ("", "_offset", "_stride"):
            rows[f"dst{field}"], rows[f"src{field}"] = self.rows[f"src{field}"], self.rows[f"dst{field}"]
        return SegmentTable(rows)

    def packed(self) -> tuple[SegmentTable, int]:
        """The same source bytes laid out in one new buffer, and the size that buffer must have.

        Each segment keeps its source offset modulo 16, so that whole vectors, and whole words of a digest, stay whole.
        """
        rows = self.rows.copy()
        padded = _align_up(rows["row_bytes"])
        wide = (rows["rows"] > 1) & (rows["row_bytes"] >= PAD_ROWS_FROM) & (rows["src_stride"] % PACK_ALIGN == 0)
        rows["dst_stride"] = np.where(wide, padded, rows["row_bytes"])
        phase = rows["src_offset"] % PACK_ALIGN
        extent = _align_up(phase + rows["rows"] * rows["dst_stride"])
        rows["dst"], rows["dst_offset"] = 0, np.cumsum(extent) - extent + phase
        return SegmentTable(rows), int(extent.sum())

    def moves_from(self, other: SegmentTable) -> SegmentTable:
        """The table that copies from where `other` keeps these bytes to where this table keeps them."""
        same = ("src", "src_offset", "src_stride", "rows", "row_bytes")
        if len(self) != len(other) or any(not np.array_equal(self.rows[name], other.rows[name]) for name in same):
            raise ValueError("tables hold different source bytes; expected the same segments in the same order")
        rows = self.rows.copy()
        for field in ("", "_offset", "_stride"):
            rows[f"src{field}"] = other.rows[f"dst{field}"]
        return SegmentTable(rows)

    def clipped(self, start: Column, stop: Column) -> SegmentTable:
        """What lies in source bytes [start, stop): one window for all sources, or an array with one per source."""
        return SegmentTable(clip_source(self.rows, per_source(start, self.rows), per_source(stop, self.rows)))


def take(rows: Rows, *, first_row: Column, count: Column, first_byte: Column, nbytes: Column) -> Rows:
    """Of every segment, `count` rows from `first_row` on, of each row `nbytes` bytes from `first_byte` on.

    Segments of which nothing is left are dropped.
    """
    part = rows.copy()
    for side in ("dst", "src"):
        part[f"{side}_offset"] += np.asarray(first_row) * rows[f"{side}_stride"] + first_byte
    part["rows"], part["row_bytes"] = count, nbytes
    return part[(part["rows"] > 0) & (part["row_bytes"] > 0)]


def clip_source(rows: Rows, start: Ints, stop: Ints) -> Rows:
    """Per segment, what lies in source bytes [start, stop): a cut first row, whole rows, a cut last row."""
    if not len(rows):
        return rows
    row_bytes, stride, offset = rows["row_bytes"], np.maximum(rows["src_stride"], 1), rows["src_offset"]
    low = np.maximum((start - offset - row_bytes) // stride + 1, 0)
    high = np.minimum(-((offset - stop) // stride), rows["rows"])
    front = np.clip(start - (offset + low * stride), 0, row_bytes)
    back = np.clip(offset + (high - 1) * stride + row_bytes - stop, 0, row_bytes)
    some = low < high
    alone = (front > 0) & (high - 1 == low)
    first_bytes = row_bytes - front - np.where(alone, back, 0)
    cut_first = take(rows, first_row=low, count=some & (front > 0), first_byte=front, nbytes=first_bytes)
    cut_last = take(rows, first_row=high - 1, count=some & (back > 0) & ~alone, first_byte=0, nbytes=row_bytes - back)
    whole = np.where(some, (high - (back > 0)) - (low + (front > 0)), 0)
    middle = take(rows, first_row=low + (front > 0), count=whole, first_byte=0, nbytes=row_bytes)
    return np.concatenate([cut_first, middle, cut_last])


def merge_rows(rows: Rows) -> Rows:
    """Empty segments dropped, and rows that lie back to back on both sides made one row."""
    rows = rows[(rows["rows"] > 0) & (rows["row_bytes"] > 0)]
    joined = (rows["dst_stride"] == rows["row_bytes"]) & (rows["src_stride"] == rows["row_bytes"])
    rows["row_bytes"] = np.where(joined, rows["rows"] * rows["row_bytes"], rows["row_bytes"])
    rows["rows"] = np.where(joined, 1, rows["rows"])
    single = rows["rows"] == 1
    for side in ("dst_stride", "src_stride"):
        rows[side] = np.where(single, rows["row_bytes"], rows[side])
    return rows


def split_rows(rows: Rows, modulus: int, side: str = "dst") -> tuple[Rows, Rows, Rows]:
    """Every row cut where its position on `side` is a multiple of `modulus`: heads, bodies of whole multiples, tails.

    The stride on that side must be a multiple of `modulus` too (see `deal_rows`), so that all rows are cut alike.
    """
    head = np.minimum(-rows[f"{side}_offset"] % modulus, rows["row_bytes"])
    body = (rows["row_bytes"] - head) // modulus * modulus
    rest = rows["row_bytes"] - head - body
    parts = ((0, head), (head, body), (head + body, rest))
    first, middle, last = (
        take(rows, first_row=0, count=rows["rows"], first_byte=first_byte, nbytes=nbytes)
        for first_byte, nbytes in parts
    )
    return first, middle, last


def deal_rows(rows: Rows, modulus: int, side: str = "src") -> Rows:
    """Segments whose rows all begin at the same position modulo `modulus` on `side`, at most `modulus` per segment.

    Rows i, i + p, i + 2p, ... share it, where p * stride is the first multiple of `modulus`.
    """
    stride = rows[f"{side}_stride"]
    period = np.where(rows["rows"] > 1, modulus // np.gcd(stride, modulus), 1)
    classes = np.minimum(period, rows["rows"])
    index = np.repeat(np.arange(len(rows)), classes)
    turn = np.arange(len(index)) - np.repeat(np.cumsum(classes) - classes, classes)
    dealt, period = rows[index], period[index]
    left = -((turn - dealt["rows"]) // period)
    dealt = take(dealt, first_row=turn, count=left, first_byte=0, nbytes=dealt["row_bytes"])
    for name in ("dst_stride", "src_stride"):
        dealt[name] *= period
    return dealt


def single_rows(rows: Rows) -> Rows:
    """Every row a segment of its own."""
    index = np.repeat(np.arange(len(rows)), rows["rows"])
    turn = np.arange(len(index)) - np.repeat(np.cumsum(rows["rows"]) - rows["rows"], rows["rows"])
    return take(rows[index], first_row=turn, count=1, first_byte=0, nbytes=rows["row_bytes"][index])


def limit_rows(rows: Rows, row_bytes: int) -> Rows:
    """No row longer than `row_bytes`: longer ones become rows that follow each other without a gap."""
    long = rows["row_bytes"] > row_bytes
    if not long.any():
        return rows
    single = single_rows(rows[long])
    whole = single["row_bytes"] // row_bytes
    left = single["row_bytes"] - whole * row_bytes
    rest = take(single, first_row=0, count=1, first_byte=whole * row_bytes, nbytes=left)
    single["rows"], single["row_bytes"] = whole, row_bytes
    for part in (single, rest):
        part["dst_stride"] = part["src_stride"] = part["row_bytes"]
    return np.concatenate([rows[~long], single, rest])


def chunks_of(segment: Any, nbytes: int) -> Rows:
    """One segment in parts of about `nbytes`: several of its rows each, or a part of a row if there is but one."""
    count, row_bytes = int(segment["rows"]), int(segment["row_bytes"])
    if count == 1:
        start = np.arange(0, row_bytes, nbytes)
        rows = np.repeat(np.atleast_1d(segment), len(start))
        return take(rows, first_row=0, count=1, first_byte=start, nbytes=np.minimum(row_bytes - start, nbytes))
    step = max(1, nbytes // row_bytes)
    start = np.arange(0, count, step)
    rows = np.repeat(np.atleast_1d(segment), len(start))
    return take(rows, first_row=start, count=np.minimum(count - start, step), first_byte=0, nbytes=row_bytes)


def row_extent(rows: Rows, side: str) -> Ints:
    """One past the last byte that each segment touches on a side."""
    extent: Ints = rows[f"{side}_offset"] + (rows["rows"] - 1) * rows[f"{side}_stride"] + rows["row_bytes"]
    return np.where((rows["rows"] > 0) & (rows["row_bytes"] > 0), extent, 0)


def per_source(value: Column, rows: Rows) -> Ints:
    """A number for every segment: the same one, or the one that `value` has for its source."""
    array = np.asarray(value, np.int64)
    return np.broadcast_to(array, rows.shape) if array.ndim == 0 else array[rows["src"]]


def _check_rows(rows: Rows) -> None:
    if not len(rows):
        return
    if np.ascontiguousarray(rows).view("<i8").min() < 0:
        name = next(name for name in FIELDS if (rows[name] < 0).any())
        raise ValueError(f"segment {int(np.argmax(rows[name] < 0))} has a negative {name}")
    several = rows["rows"] > 1
    for side in ("dst", "src"):
        overlaps = several & (rows[f"{side}_stride"] < rows["row_bytes"])
        if overlaps.any():
            raise ValueError(f"rows of segment {int(np.argmax(overlaps))} overlap: {side}_stride below row_bytes")


def _align_up(value: Ints) -> Ints:
    return -(-value // PACK_ALIGN) * PACK_ALIGN
