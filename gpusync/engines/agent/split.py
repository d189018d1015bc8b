"""How a tensor is split over tensor-parallel ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rows_of(shape: Sequence[int], *, rank: int, size: int) -> tuple[int, int] | None:
    """First and last row (exclusive) of the rank's part, or None where every rank holds all of it."""
    if size == 1 or len(shape) != 2 or shape[0] % size:
        return None
    part = shape[0] // size
    return rank * part, (rank + 1) * part
