"""Segments as sets of bytes, against the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.digest import intervals
from gpusync.digest.intervals import (
    ByTensor,
    flat_rows,
    is_exact_cover,
    merged,
    overlaps,
    packed_in_order,
    restrict,
    shared_numbers,
)
from gpusync_kernels.segments import Rows, SegmentTable


def table(*segments) -> Rows:
    """(src_offset, rows, row_bytes, src_stride) each; destinations one after another in one buffer."""
    offset, rows, row_bytes, stride = np.array(segments, np.int64).reshape(-1, 4).T
    size = rows * row_bytes
    return SegmentTable.strided(
        dst=0,
        dst_offset=np.cumsum(size) - size,
        dst_stride=row_bytes,
        src=0,
        src_offset=offset,
        src_stride=np.maximum(stride, row_bytes),
        rows=rows,
        row_bytes=row_bytes,
    ).rows


def bytes_of(rows: Rows, side: str = "src") -> list[int]:
    """Every source (or destination) byte, in the order of the segments."""
    return [
        int(row[f"{side}_offset"] + i * row[f"{side}_stride"] + j)
        for row in rows
        for i in range(row["rows"])
        for j in range(row["row_bytes"])
    ]


segments = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=6
)


def without_overlap(rows: Rows) -> Rows:
    """The segments that share no byte with one before them."""
    kept, seen = [], set()
    for row in rows:
        mine = set(bytes_of(row[None]))
        if len(mine) == row["rows"] * row["row_bytes"] and not mine & seen:
            kept.append(row)
            seen |= mine
    return np.array(kept, rows.dtype)


@given(segments=segments)
def test_overlaps_are_found(segments):
    rows = table(*segments)
    held = bytes_of(rows)
    assert overlaps(rows) == (len(held) != len(set(held)))


@given(segments=segments, cells=st.sampled_from([1, 1 << 22]))
def test_overlaps_are_found_on_a_grid_and_without(segments, cells):
    stride = segments[0][3] + 6
    rows = table(*((offset, count, size, stride) for offset, count, size, _ in segments))
    held = bytes_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "MAX_GRID_CELLS", cells)
        assert overlaps(rows) == (len(held) != len(set(held)))


@given(segments=segments)
def test_exact_cover(segments):
    rows = without_overlap(table(*segments))
    held = set(bytes_of(rows))
    nbytes = max(held) + 1
    assert is_exact_cover(rows, nbytes) == (held == set(range(nbytes)))


def test_columns_of_many_rows_are_few_edges():
    count, width = 20_000, 64
    columns = [(left, count, 16, width) for left in range(0, width, 16)]
    assert is_exact_cover(table(*columns), count * width)
    assert not is_exact_cover(table(*columns[:3], (47, count, 16, width)), count * width)


@given(segments=segments, region=segments)
def test_restrict_keeps_what_both_hold_with_its_destination(segments, region):
    rows, region = without_overlap(table(*segments)), without_overlap(table(*region))
    found = restrict(rows, region)
    place = dict(zip(bytes_of(rows), bytes_of(rows, "dst"), strict=True))
    expected = sorted(set(place) & set(bytes_of(region)))
    assert bytes_of(found) == expected
    assert bytes_of(found, "dst") == [place[byte] for byte in expected]


@given(segments=segments)
def test_packed_in_order_counts_the_held_bytes(segments):
    rows = without_overlap(table(*segments))
    place = dict(zip(bytes_of(rows), bytes_of(rows, "dst"), strict=True))
    packed = packed_in_order(rows)
    assert bytes_of(packed) == list(range(len(place)))
    assert bytes_of(packed, "dst") == [place[byte] for byte in sorted(place)]


def test_segments_of_some_tensors():
    rows = np.concatenate([flat_rows([5, 0], [6, 2], tensor) for tensor in (3, 0, 2)])
    table_ = ByTensor(rows, 5)
    assert table_.slice(3)["src_offset"].tolist() == [0, 5]
    assert len(table_.slice(4)) == 0
    found = table_.of(np.array([2, 1, 3]))
    assert found["src"].tolist() == [0, 0, 2, 2]
    assert found["src_offset"].tolist() == [0, 5, 0, 5]


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


def numbers_of(starts, stops) -> list[int]:
    return [number for start, stop in zip(starts, stops, strict=True) for number in range(start, stop)]


@given(first=spans, second=spans)
def test_merged_intervals_and_the_numbers_that_two_series_share(first, second):
    series = [merged(*np.array(each, np.int64).reshape(-1, 2).T) for each in (first, second)]
    wanted = [{number for start, stop in each for number in range(start, stop)} for each in (first, second)]
    for (starts, stops), numbers in zip(series, wanted, strict=True):
        assert numbers_of(starts, stops) == sorted(numbers)
    assert shared_numbers(*series[0], *series[1]).tolist() == sorted(wanted[0] & wanted[1])
