"""Element positions of a tensor -> where they lie on a rank. Pure numpy; shared by `overwrite` and `sparse`.

A segment holds position p, counted in elements of the whole tensor, if p - its first position, divided by its source
stride, gives a row that it has and a column inside the row.

    a [4, 6] tensor, columns 2..3 held: position 15 is row 2, column 1 of the segment; position 16 is not held
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpusync_kernels.buffers import Bytes, Ints
from gpusync_kernels.segments import Column, Rows, per_source, single_rows

UNSIGNED: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
MAX_STRIDE = (1 << 31) - 1  # elements: kernels divide positions by it in 32 bits


def element_rows(rows: Rows, element_bytes: Column) -> Rows:
    """Merged segments with source offset, source stride and row length in elements; the destination stays in bytes.

    `element_bytes`: one number, or one per source. Raises ValueError where a segment cuts an element.
    """
    far = (rows["rows"] > 1) & (rows["src_stride"] > MAX_STRIDE)
    rows = np.concatenate([rows[~far], single_rows(rows[far])])
    size = per_source(element_bytes, rows)
    names = ("src_offset", "src_stride", "row_bytes", "dst_stride")
    for name in names:
        cut = (rows[name] % size != 0) & ((rows["rows"] > 1) | (name in ("src_offset", "row_bytes")))
        if cut.any():
            first = int(np.argmax(cut))
            raise ValueError(
                f"segment of source {rows['src'][first]} cuts an element of {size[first]} bytes: "
                f"{name} {rows[name][first]}"
            )
    for name in names[:3]:
        rows[name] //= size
    return rows


def join_sources(sources: Sequence[int] | Ints, rows: Rows) -> tuple[Ints, Ints]:
    """All pairs (i, j) where `sources[i]` is the source of segment j, as two arrays, ordered by i."""
    order = np.argsort(rows["src"], kind="stable")
    sorted_sources = rows["src"][order]
    wanted = np.asarray(sources, np.int64)
    low = np.searchsorted(sorted_sources, wanted, "left")
    count = np.searchsorted(sorted_sources, wanted, "right") - low
    left = np.repeat(np.arange(len(wanted)), count)
    inner = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
    return left, order[np.repeat(low, count) + inner]


def locate(positions: Ints, segment: Any, element_bytes: int) -> tuple[Any, Ints]:
    """Which positions a segment of `element_rows` holds, and where, as an index into `elements_of` the segment.

    The first selects from `positions`: a mask, or a slice where all are held.
    """
    offset = positions - segment["src_offset"]
    if segment["rows"] == 1:
        inside = (offset >= 0) & (offset < segment["row_bytes"])
        return (slice(None), offset) if inside.all() else (inside, offset[inside])
    row, column = np.divmod(offset, segment["src_stride"])
    inside = (row >= 0) & (row < segment["rows"]) & (column < segment["row_bytes"])
    return inside, row[inside] * (segment["dst_stride"] // element_bytes) + column[inside]


def elements_of(buffers: Sequence[Bytes], segment: Any, element_bytes: int) -> np.ndarray[Any, Any]:
    """The destination from the segment's first element on, as unsigned words that `locate` gives indices into.

    Not necessarily aligned: files hold tensors at any offset.
    """
    data = buffers[segment["dst"]][segment["dst_offset"] :]
    words: np.ndarray[Any, Any] = data[: len(data) // element_bytes * element_bytes].view(UNSIGNED[element_bytes])
    return words
