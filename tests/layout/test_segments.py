"""Pieces as segments: every byte goes where the piece says, in as few runs as can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gpusync.layout import Piece, segment_groups
from gpusync.layout.segments import count_segments, destination_runs, merge_segments, piece_segments
from gpusync_kernels.segments import SegmentTable
from support.models_apply import runs_of
from support.models_views import bases, views

WIDTH = {"U8": 1, "BF16": 2, "F32": 4}


@st.composite
def pieces(draw: st.DrawFn, *, expands: bool = False) -> Piece:
    """A view of a tensor, copied to a view of a param of the same shape: both nested, as views are."""
    source = draw(views(draw(bases()), expands=expands))
    order = draw(st.permutations(range(source.dim())))
    room = [draw(st.integers(0, 2)) for _ in order]
    target = torch.zeros([source.shape[d] + extra for d, extra in zip(order, room, strict=True)])
    start = [draw(st.integers(0, extra)) for extra in room]
    target = target[tuple(slice(a, a + source.shape[d]) for a, d in zip(start, order, strict=True))]
    target = target.permute([order.index(d) for d in range(source.dim())])
    assert target.shape == source.shape
    return Piece(
        param="p",
        dtype=draw(st.sampled_from(sorted(WIDTH))),
        size=tuple(source.shape),
        src_offset=source.storage_offset(),
        src_stride=tuple(source.stride()),
        dst_offset=target.storage_offset(),
        dst_stride=tuple(target.stride()),
    )


def moves_of(piece: Piece) -> dict[int, int]:
    """Destination byte -> source byte, element by element."""
    width = WIDTH[piece.dtype]
    moves = {}
    for index in np.ndindex(*piece.size):
        src = piece.src_offset + sum(i * s for i, s in zip(index, piece.src_stride, strict=True))
        dst = piece.dst_offset + sum(i * s for i, s in zip(index, piece.dst_stride, strict=True))
        moves.update((dst * width + byte, src * width + byte) for byte in range(width))
    return moves


def expanded(rows: np.ndarray) -> dict[int, int]:
    moves: dict[int, int] = {}
    for src, dst, count in runs_of(rows):
        assert not moves.keys() & set(range(dst, dst + count))
        moves.update((dst + byte, src + byte) for byte in range(count))
    return moves


def longest_runs(moves: dict[int, int]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for dst in sorted(moves):
        src = moves[dst]
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (src, dst):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((src, dst, 1))
    return runs


@given(pieces(expands=True))
def test_the_segments_of_a_piece_move_its_bytes(piece):
    rows = piece_segments(piece)
    SegmentTable(rows)
    assert len(rows) == count_segments(piece)
    assert expanded(rows) == moves_of(piece)


@given(pieces())
def test_runs_are_as_long_as_they_can_be(piece):
    assume(_is_in_order(piece))
    (group,) = segment_groups([piece])
    assert sorted(runs_of(group.table.rows)) == sorted(longest_runs(moves_of(piece)))


def _is_in_order(piece: Piece) -> bool:
    """False where something is transposed, or where what is no run ends just before the next of its kind begins: there,
    single elements touch at corners, and are not joined."""
    sizes = zip(piece.dst_stride, piece.src_stride, piece.size, strict=True)
    dims = sorted((dst, src, n) for dst, src, n in sizes if n > 1)
    if [src for _, src, _ in dims] != sorted(src for _, src, _ in dims):
        return False
    last_dst = last_src = 0
    is_run = True
    for dst, src, n in dims:
        goes_on = (dst - last_dst, src - last_src) == (1, 1)
        if goes_on and not is_run:
            return False
        is_run = goes_on
        last_dst, last_src = last_dst + (n - 1) * dst, last_src + (n - 1) * src
    return True


@given(pieces(), st.data())
def test_a_piece_that_was_loaded_in_parts_is_put_together_again(piece, data):
    parts = [piece]
    for _ in range(data.draw(st.integers(1, 3))):
        part = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts += _halves(part, data)
    (group,) = segment_groups(data.draw(st.permutations(parts)))
    assert expanded(group.table.rows) == moves_of(piece)
    (together,) = segment_groups([piece])
    if len(together.table) == 1 and _is_in_order(piece):
        assert group.table.rows.tolist() == together.table.rows.tolist()


def _halves(piece: Piece, data: st.DataObject) -> list[Piece]:
    long = [dim for dim, size in enumerate(piece.size) if size > 1]
    if not long:
        return [piece]
    dim = data.draw(st.sampled_from(long))
    at = data.draw(st.integers(1, piece.size[dim] - 1))
    return [
        replace(
            piece,
            size=(*piece.size[:dim], count, *piece.size[dim + 1 :]),
            src_offset=piece.src_offset + first * piece.src_stride[dim],
            dst_offset=piece.dst_offset + first * piece.dst_stride[dim],
        )
        for first, count in ((0, at), (at, piece.size[dim] - at))
    ]


@given(pieces(expands=True), st.sampled_from([1, 4, 7, 16, 64, 1 << 20]))
def test_windows_of_a_piece_are_all_of_it_and_small(piece, window_bytes):
    moves: dict[int, int] = {}
    for part in piece.within(window_bytes):
        start, stop = part.src_span
        assert stop - start <= max(window_bytes, WIDTH[part.dtype])
        assert not moves.keys() & moves_of(part).keys()
        moves.update(moves_of(part))
        assert all(start <= src < stop for src in moves_of(part).values())
    assert moves == moves_of(piece)


@given(pieces())
def test_the_runs_of_a_destination_are_its_bytes(piece):
    runs = destination_runs([piece])
    covered = [byte for start, stop in runs.tolist() for byte in range(start, stop)]
    assert sorted(covered) == sorted(moves_of(piece))
    assert covered == sorted(covered)


def piece(**fields: object) -> Piece:
    defaults = {"param": "p", "dtype": "BF16", "src_offset": 0, "dst_offset": 0}
    return Piece(**{**defaults, **fields})  # type: ignore[arg-type]


def test_the_worked_example():
    columns = piece(dtype="U8", size=(4, 2), src_offset=26, src_stride=(6, 1), dst_offset=100, dst_stride=(2, 1))
    rows = piece_segments(columns)
    assert rows.dtype.names is not None
    values = dict(zip(rows.dtype.names, rows[0].tolist(), strict=True))
    assert values == {
        "dst": 0, "dst_offset": 100, "dst_stride": 2, "src": 0, "src_offset": 26, "src_stride": 6, "rows": 4,
        "row_bytes": 2,
    }  # fmt: skip


def test_a_column_slice_of_a_large_matrix_is_one_segment():
    rows = piece_segments(piece(size=(1 << 20, 1 << 10), src_stride=(1 << 13, 1), dst_stride=(1 << 10, 1)))
    assert [(row["rows"], row["row_bytes"]) for row in rows] == [(1 << 20, 1 << 11)]


def test_a_transposed_matrix_needs_one_segment_for_each_of_its_shorter_side():
    assert count_segments(piece(size=(64, 4096), src_stride=(4096, 1), dst_stride=(1, 64))) == 64


def test_pieces_that_convert_count_elements():
    fields = {"size": (3, 2), "src_stride": (4, 1), "dst_stride": (2, 1), "dst_offset": 5}
    (group,) = segment_groups([piece(converts="F32", **fields)])
    assert (group.dtype, group.converts) == ("BF16", "F32")
    assert runs_of(group.table.rows) == [(0, 5, 2), (4, 7, 2), (8, 9, 2)]


def test_pieces_of_several_storages_and_kinds_are_grouped():
    fields = {"size": (2,), "src_stride": (1,), "dst_stride": (1,)}
    groups = segment_groups(
        [piece(**fields), piece(param="q", **fields), piece(converts="F32", **fields), piece(src_offset=2, **fields)]
    )
    assert [(g.param, g.dtype, g.converts, len(g.table)) for g in groups] == [
        ("p", "U8", None, 2),
        ("q", "U8", None, 1),
        ("p", "BF16", "F32", 1),
    ]


def test_nothing_gives_nothing():
    assert segment_groups([]) == []
    empty = piece(size=(0, 3), src_stride=(3, 1), dst_stride=(3, 1))
    assert len(piece_segments(empty)) == count_segments(empty) == 0
    assert len(merge_segments(piece_segments(empty))) == 0
    assert destination_runs([empty]).shape == (0, 2)
