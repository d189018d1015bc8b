"""Segment tables: every way to cut one keeps its bytes, judged by the definition of a segment alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import brute_pairs, flat_cases, strided_cases, tables

from gpusync_kernels import SegmentTable, bind_moves
from gpusync_kernels.segments import (
    SEGMENT,
    chunks_of,
    deal_rows,
    limit_rows,
    merge_rows,
    single_rows,
    split_rows,
)
from gpusync_kernels.tiling import MAX_PROGRAMS, UNITS, map_programs, move_launch, split_by_unit


def pairs(*parts) -> list[tuple[int, int, int, int]]:
    return sorted(brute_pairs(SegmentTable(np.concatenate(parts))))


@given(tables())
def test_merged_rows_are_the_same_bytes(table):
    assert pairs(merge_rows(table.rows)) == pairs(table.rows)


@given(tables(), st.integers(0, 200), st.integers(0, 200))
def test_a_clipped_table_holds_what_lies_in_the_window(table, start, stop):
    expected = [each for each in brute_pairs(table) if start <= each[3] < stop]
    assert pairs(table.clipped(start, stop).rows) == sorted(expected)


def test_each_source_has_its_own_window():
    table = SegmentTable.flat(dst=[0, 1], src=[0, 1], nbytes=10)
    clipped = table.clipped([2, 0], [10, 3])
    assert sorted(each[2:] for each in brute_pairs(clipped)) == [(0, i) for i in range(2, 10)] + [
        (1, i) for i in range(3)
    ]


@given(tables(), st.sampled_from([4, 8, 16]))
def test_dealt_rows_share_their_phase_and_split_there(table, modulus):
    dealt = deal_rows(merge_rows(table.rows), modulus)
    assert pairs(dealt) == pairs(table.rows)
    head, body, tail = split_rows(dealt, modulus, "src")
    assert pairs(head, body, tail) == pairs(table.rows)
    assert (body["row_bytes"] % modulus == 0).all()
    assert (body["src_offset"] % modulus == 0).all()
    assert ((body["rows"] == 1) | (body["src_stride"] % modulus == 0)).all()
    assert (head["row_bytes"] < modulus).all()
    assert (tail["row_bytes"] < modulus).all()


@given(tables(), st.integers(1, 50))
def test_rows_are_limited_and_made_single(table, limit):
    rows = merge_rows(table.rows)
    assert pairs(limit_rows(rows, limit)) == pairs(rows)
    assert (limit_rows(rows, limit)["row_bytes"] <= limit).all()
    assert pairs(single_rows(rows)) == pairs(rows)
    assert (single_rows(rows)["rows"] == 1).all()


@given(tables(), st.integers(1, 50))
def test_chunks_are_the_whole_segment(table, nbytes):
    rows = merge_rows(table.rows)
    chunks = [chunks_of(segment, nbytes) for segment in rows]
    assert pairs(np.empty(0, SEGMENT), *chunks) == pairs(rows)


@settings(max_examples=200)
@given(tables())
def test_units_are_multiples_of_themselves_and_cover_all(table):
    by_unit = split_by_unit(table.rows)
    assert pairs(np.empty(0, SEGMENT), *by_unit.values()) == pairs(table.rows)
    for unit, rows in by_unit.items():
        for name in ("dst_offset", "src_offset", "row_bytes"):
            assert (rows[name] % unit == 0).all()
        for name in ("dst_stride", "src_stride"):
            assert ((rows["rows"] == 1) | (rows[name] % unit == 0)).all()


@pytest.mark.parametrize("cases", [flat_cases, strided_cases])
def test_every_unit_occurs_and_all_programs_have_work(cases):
    by_unit = split_by_unit(cases().rows)
    assert set(by_unit) == set(UNITS)
    for unit, rows in by_unit.items():
        launch = move_launch(rows, unit)
        tiles = -(-(rows["rows"] * rows["row_bytes"] // unit) // 1024)
        assert np.bincount(launch.piece_of_program).tolist() == tiles.tolist()


def test_packing_keeps_bytes_apart_and_phases():
    table = SegmentTable.concat([flat_cases(), strided_cases()])
    packed, nbytes = table.packed()
    found = brute_pairs(packed)
    assert len({each[1] for each in found}) == len(found) == table.nbytes
    assert max(each[1] for each in found) < nbytes < table.nbytes * 1.1 + 40 * len(table)
    assert (packed.rows["dst_offset"] % 16 == table.rows["src_offset"] % 16).all()
    moves = brute_pairs(packed.moves_from(table))
    assert [(each[2], each[3]) for each in moves] == [(each[0], each[1]) for each in brute_pairs(table)]
    assert brute_pairs(table.swapped().swapped()) == brute_pairs(table)


def test_programs_are_mapped_in_order():
    first, piece = map_programs(np.array([5, 0, 2]))
    assert first.tolist() == [0, 5, 5]
    assert piece.tolist() == [0, 0, 0, 0, 0, 2, 2]
    with pytest.raises(ValueError, match=f"expected at most {MAX_PROGRAMS}"):
        map_programs(np.array([MAX_PROGRAMS, 1]))


def test_a_column_of_the_module_docstring():
    table = SegmentTable.strided(dst_offset=100, dst_stride=2, src_offset=2, src_stride=6, rows=4, row_bytes=2)
    tensor = np.arange(24, dtype=np.uint8).reshape(4, 6)
    held = [tensor.ravel()[each[3]] for each in brute_pairs(table)]
    assert held == tensor[:, 2:4].ravel().tolist()
    assert [each[1] for each in brute_pairs(table)] == list(range(100, 108))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"dst_offset": -1, "nbytes": 4}, "segment 0 has a negative dst_offset"),
        ({"nbytes": [4, -4]}, "segment 1 has a negative dst_stride"),
    ],
)
def test_negative_numbers_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        SegmentTable.flat(**columns)


def test_overlapping_rows_are_refused():
    with pytest.raises(ValueError, match="rows of segment 0 overlap: src_stride below row_bytes"):
        SegmentTable.strided(dst_stride=8, src_stride=7, rows=2, row_bytes=8)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (SegmentTable.flat(dst=1, nbytes=4), "segment 0 names dst 1, found 1"),
        (SegmentTable.flat(src_offset=[0, 97], nbytes=4), "segment 1 ends at byte 101 of src 0, which has 100"),
        (
            SegmentTable.strided(dst_stride=50, src_stride=2, rows=3, row_bytes=2),
            "segment 0 ends at byte 102 of dst 0, which has 100",
        ),
    ],
)
def test_a_segment_outside_its_buffer_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        bind_moves(table, dst=[np.zeros(100, np.uint8)], src=[np.zeros(100, np.uint8)])


def test_a_buffer_with_gaps_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\) is not contiguous"):
        list(
            bind_moves(
                SegmentTable.flat(nbytes=1), dst=[np.zeros(10, np.uint8)[::2]], src=[np.zeros(5, np.uint8)]
            ).views()
        )
