"""Which rows a tensor-parallel worker holds."""

from __future__ import annotations

import pytest

from gpusync.engines.agent.split import rows_of


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((8, 3), 1, [None]),
        ((8, 3), 2, [(0, 4), (4, 8)]),
        ((8, 3), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ((0, 3), 2, [(0, 0), (0, 0)]),
        ((7, 2), 2, [None, None]),
        ((8,), 2, [None, None]),
        ((8, 2, 2), 2, [None, None]),
        ((), 2, [None, None]),
    ],
)
def test_only_matrices_that_divide_are_split_in_the_order_of_the_ranks(shape, size, expected) -> None:
    assert [rows_of(shape, rank=rank, size=size) for rank in range(size)] == expected
