"""Which bytes of a tensor a table's segments hold: pure arithmetic on their source side.

Segments are rows of `gpusync_kernels.SegmentTable`; "single" means one row each. Functions that say "of one tensor" do
not look at `src`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.segments import SEGMENT, Rows, single_rows, take

Ints = npt.NDArray[np.int64]

MAX_GRID_CELLS = 1 << 22


class ByTensor:
    """Segments sorted by tensor and position, so that those of some tensors are found at once."""

    def __init__(self, rows: Rows, tensors: int) -> None:
        self.rows = by_position(rows)
        self.starts = np.searchsorted(self.rows["src"], np.arange(tensors + 1))

    def of(self, tensors: Ints) -> Rows:
        """A copy of the segments of these tensors, `src` counted in `tensors`."""
        first, count = self.starts[tensors], self.starts[tensors + 1] - self.starts[tensors]
        owner = np.repeat(np.arange(len(tensors)), count)
        inner = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        rows: Rows = self.rows[first[owner] + inner]
        rows["src"] = owner
        return rows

    def slice(self, tensor: int) -> Rows:
        """A view of the segments of one tensor."""
        rows: Rows = self.rows[self.starts[tensor] : self.starts[tensor + 1]]
        return rows


def singles_of(rows: Rows) -> Rows:
    """Every row a segment of its own, by tensor and position."""
    return by_position(single_rows(rows))


def by_position(rows: Rows) -> Rows:
    """A copy, by tensor and position."""
    ordered: Rows = rows[np.lexsort((rows["src_offset"], rows["src"]))]
    return ordered


def sizes_by_tensor(rows: Rows, tensors: int) -> Ints:
    sizes = np.zeros(tensors, np.int64)
    np.add.at(sizes, rows["src"], rows["rows"] * rows["row_bytes"])
    return sizes


def span_stops(rows: Rows) -> Ints:
    """One past the last source byte of each segment."""
    stops: Ints = rows["src_offset"] + (rows["rows"] - 1) * rows["src_stride"] + rows["row_bytes"]
    return stops


def is_exact_cover(rows: Rows, nbytes: int) -> bool:
    """Whether these segments of one tensor hold each of its bytes once."""
    # with as many bytes as the tensor has, no overlap is full cover
    return int((rows["rows"] * rows["row_bytes"]).sum()) == nbytes and not overlaps(rows)


def overlaps(rows: Rows) -> bool:
    """Whether any two of these segments of one tensor share a byte."""
    strides = np.unique(rows["src_stride"][rows["rows"] > 1])
    found = _overlap_on_grid(rows, int(strides[0])) if len(strides) == 1 else None
    if found is None:
        single = singles_of(rows)
        found = bool((single["src_offset"][1:] < span_stops(single)[:-1]).any())
    return found


def restrict(rows: Rows, region: Rows) -> Rows:
    """What `rows` hold of the bytes that `region` holds: singles by position. Both of one tensor, each without overlap.

    rows [0, 10) and [20, 30), region [5, 22): [5, 10) and [20, 22)
    """
    single, wanted = singles_of(rows), singles_of(region)
    starts, stops = single["src_offset"], span_stops(single)
    i, j = _meeting(starts, stops, wanted["src_offset"], span_stops(wanted))
    first = np.maximum(starts[j], wanted["src_offset"][i])
    nbytes = np.minimum(stops[j], span_stops(wanted)[i]) - first
    return take(single[j], first_row=0, count=1, first_byte=first - starts[j], nbytes=nbytes)


def packed_in_order(rows: Rows) -> Rows:
    """Segments of one tensor, source positions replaced by positions among the bytes that they hold.

    A column [4, 6) of a tensor with rows of 10 bytes: byte 14 of the tensor is byte 2.
    """
    rows = rows[np.argsort(rows["src_offset"], kind="stable")]
    if (rows["src_offset"][1:] < span_stops(rows)[:-1]).any():
        rows = singles_of(rows)
    nbytes = rows["rows"] * rows["row_bytes"]
    rows["src_offset"], rows["src_stride"] = np.cumsum(nbytes) - nbytes, rows["row_bytes"]
    return rows


def merged(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The same numbers as intervals that are sorted and share none."""
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(stops[order])
    new = np.flatnonzero(np.append(True, starts[1:] > reached[:-1])) if len(starts) else np.zeros(0, np.int64)
    return starts[new], np.append(reached[new[1:] - 1], reached[-1:])


def shared_numbers(starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints) -> Ints:
    """The numbers that lie in both of two series of sorted intervals which share none within a series."""
    i, j = _meeting(starts, stops, other_starts, other_stops)
    first, stop = np.maximum(starts[j], other_starts[i]), np.minimum(stops[j], other_stops[i])
    count = stop - first
    numbers: Ints = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    return numbers


def flat_rows(starts: Any, stops: Any, tensor: int = 0) -> Rows:
    """Intervals of one tensor as segments that name no destination."""
    rows = np.zeros(len(starts), SEGMENT)
    rows["src"], rows["src_offset"], rows["rows"] = tensor, starts, 1
    rows["row_bytes"] = rows["src_stride"] = np.asarray(stops) - np.asarray(starts)
    return rows


def _meeting(starts: Ints, stops: Ints, other_starts: Ints, other_stops: Ints) -> tuple[Ints, Ints]:
    """All pairs (i, j) where interval i of the other series meets interval j, by i and j. Both sorted, none empty."""
    low = np.searchsorted(stops, other_starts, "right")
    count = np.maximum(np.searchsorted(starts, other_stops, "left") - low, 0)
    i = np.repeat(np.arange(len(count)), count)
    return i, low[i] + np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)


def _overlap_on_grid(rows: Rows, width: int) -> bool | None:
    """`overlaps` for segments of one stride, which are rectangles when the tensor is laid out in rows of that width.

    None where the grid of their edges would be too large. Columns of 20,000 rows are two edges here, not 20,000 pieces.
    """
    top, bottom, left, right = _rectangles(rows, width)
    ys, xs = np.unique(np.concatenate([top, bottom])), np.unique(np.concatenate([left, right]))
    if len(ys) * len(xs) > MAX_GRID_CELLS:
        return None
    count = np.zeros((len(ys), len(xs)), np.int32)
    corners = ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1))
    for y, x, sign in corners:
        np.add.at(count, (np.searchsorted(ys, y), np.searchsorted(xs, x)), sign)
    return bool((count.cumsum(axis=0).cumsum(axis=1) > 1).any())


def _rectangles(rows: Rows, width: int) -> tuple[Ints, Ints, Ints, Ints]:
    """`(top, bottom, left, right)`: a strided segment is one or, across the edge, two; a flat one up to three."""
    many = rows[rows["rows"] > 1]
    top, left = np.divmod(many["src_offset"], width)
    bottom, right = top + many["rows"], left + many["row_bytes"]
    nothing = np.zeros_like(left)
    parts = [(top, bottom, left, np.minimum(right, width)), (top + 1, bottom + 1, nothing, right - width)]
    flat = rows[rows["rows"] == 1]
    top, left = np.divmod(flat["src_offset"], width)
    bottom, right = np.divmod(flat["src_offset"] + flat["row_bytes"] - 1, width)
    right, nothing, full = right + 1, np.zeros_like(left), np.full_like(left, width)
    one = top == bottom
    parts += [
        (top, top + 1, left, np.where(one, right, width)),
        (top + 1, bottom, nothing, full),
        (bottom, bottom + 1, nothing, np.where(one, 0, right)),
    ]
    top, bottom, left, right = (np.concatenate(each) for each in zip(*parts, strict=True))
    some = (top < bottom) & (left < right)
    return top[some], bottom[some], left[some], right[some]
