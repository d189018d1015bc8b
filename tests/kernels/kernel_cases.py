"""Buffers, tables and comparisons that the kernel tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gpusync_kernels import SegmentTable
from gpusync_kernels.segments import SEGMENT

POISON = 0xA5

# empty, one byte, a stripe and one less, the largest short hash and one more, a block -1 / 0 / +1, a tile of 16-byte
# units (16 KiB) -1 / 0 / +1, and an odd size over two tiles
SIZES = (0, 1, 63, 64, 240, 241, 1023, 1024, 1025, 16383, 16384, 16385, 40_003)


def random_bytes(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def poisoned(nbytes: int) -> np.ndarray:
    """A buffer in which an unwritten byte shows."""
    return np.full(nbytes, POISON, np.uint8)


def brute_pairs(table: SegmentTable) -> list[tuple[int, int, int, int]]:
    """(dst, byte in it, src, byte in it) of every byte of a table, from the definition in `segments.py` alone."""
    pairs = []
    for dst, dst_offset, dst_stride, src, src_offset, src_stride, rows, row_bytes in table.rows.tolist():
        for row in range(rows):
            for byte in range(row_bytes):
                pairs.append((dst, dst_offset + row * dst_stride + byte, src, src_offset + row * src_stride + byte))
    return pairs


def flat_cases() -> SegmentTable:
    """Every size at every combination of alignments that the cut into units tells apart, in one table: dst 0, src 0."""
    offsets, at = [], 0
    for nbytes in SIZES:
        for dst_phase, src_phase in ((0, 0), (3, 3), (4, 8), (16, 1), (7, 2)):
            at = -(-at // 16) * 16
            offsets.append((at + dst_phase, at + src_phase, nbytes))
            at += nbytes + 32
    dst, src, nbytes = np.array(offsets).T
    return SegmentTable.flat(dst_offset=dst, src_offset=src, nbytes=nbytes)


def strided_cases() -> SegmentTable:
    """Rows of 1, 3, 16, 48, 31, 1500, 2048 bytes; strides that are and are not multiples of 16; dst 1, src 0."""
    shapes = [
        # dst_offset, dst_stride, src_offset, src_stride, rows, row_bytes
        (5, 2, 40, 7, 300, 1),
        (1024, 3, 3000, 5, 100, 3),
        (2048, 16, 8000, 64, 257, 16),
        (8192, 64, 32768, 80, 129, 48),
        (20001, 33, 50007, 37, 100, 31),
        (32768, 1504, 60000, 1520, 12, 1500),
        (65536, 2048, 80000, 4096, 19, 2048),
        (120000, 4, 0, 8, 33, 4),
    ]
    columns = np.array(shapes).T
    names = ("dst_offset", "dst_stride", "src_offset", "src_stride", "rows", "row_bytes")
    return SegmentTable.strided(dst=1, src=0, **dict(zip(names, columns, strict=True)))


@st.composite
def tables(draw):
    """Up to three segments of up to seven short rows, at any offsets; some rows touch, some segments are empty."""
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        row_bytes = draw(st.integers(0, 40))
        strides = [row_bytes + draw(st.sampled_from([0, 0, 1, 5, 8, 16, 24])) for _ in range(2)]
        offsets = [draw(st.integers(0, 70)) for _ in range(2)]
        count = draw(st.integers(0, 7))
        rows.append((draw(st.integers(0, 1)), offsets[0], strides[0], 0, offsets[1], strides[1], count, row_bytes))
    return SegmentTable(np.array(rows, SEGMENT) if rows else np.empty(0, SEGMENT))


def extent(table: SegmentTable, side: str) -> list[int]:
    """How large each buffer of a side must be, with some room after it."""
    rows = table.rows
    end = rows[f"{side}_offset"] + np.maximum(rows["rows"] - 1, 0) * rows[f"{side}_stride"] + rows["row_bytes"]
    return [int(end[rows[side] == i].max(initial=0)) + 40 for i in range(int(rows[side].max(initial=0)) + 1)]


def assert_same_bytes(found: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Bit equality; the failure says how many bytes differ, the first of them, and both values."""
    found, expected = np.asarray(found).reshape(-1).view(np.uint8), np.asarray(expected).reshape(-1).view(np.uint8)
    assert found.size == expected.size, f"{what}: {found.size} bytes, expected {expected.size}"
    different = np.flatnonzero(found != expected)
    first = int(different[0]) if different.size else -1
    assert different.size == 0, (
        f"{what}: {different.size} of {found.size} bytes differ, the first at {first}: "
        f"found {found[first]:#04x}, expected {expected[first]:#04x}"
    )
