"""Tensors shared out among owners, for tests: who has which bytes, and the pieces to hand in."""

from __future__ import annotations

import itertools

import numpy as np

Ranges = list[tuple[int, int]]

# empty, one byte, around the short hash's forms (16, 128, 240), a block -1 / 0 / +1, four blocks and a byte
SIZES = (0, 1, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4097)
KINDS = ("rows", "columns", "random", "overlapping", "one owner")


def random_bytes(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def share_out(kind: str, nbytes: int, owners: int, seed: int) -> list[Ranges]:
    """Byte ranges of each owner: together all bytes, at odd offsets; only "overlapping" has a byte twice."""
    rng = np.random.default_rng([seed, nbytes, owners])
    if kind == "columns":
        return columns(nbytes, int(rng.integers(owners, 3000)), owners, rng)
    if kind == "one owner":
        shares: list[Ranges] = [[] for _ in range(owners)]
        shares[-1] = [(0, nbytes)]
        return shares
    cuts = owners - 1 if kind == "rows" else int(rng.integers(1, 40))
    edges = [0, *sorted(rng.integers(0, nbytes + 1, cuts).tolist()), nbytes]
    shares = [[] for _ in range(owners)]
    for number, (first, stop) in enumerate(itertools.pairwise(edges)):
        shares[number if kind == "rows" else int(rng.integers(owners))].append((first, stop))
    if kind == "overlapping":
        for share in shares:
            extra = np.sort(rng.integers(0, nbytes + 1, (int(rng.integers(4)), 2)), axis=1)
            share += [(int(first), int(stop)) for first, stop in extra]
    return shares


def columns(nbytes: int, width: int, owners: int, rng: np.random.Generator) -> list[Ranges]:
    """The tensor in rows of `width` bytes, cut at the same columns in every row."""
    cuts = [0, *sorted(rng.integers(0, width + 1, owners - 1).tolist()), width]
    shares: list[Ranges] = []
    for left, right in itertools.pairwise(cuts):
        pieces = [(row + left, min(row + right, nbytes)) for row in range(0, nbytes, width)]
        shares.append([(first, stop) for first, stop in pieces if first < stop])
    return shares


def pieces_of(data: np.ndarray, ranges: Ranges) -> list[tuple[int, np.ndarray]]:
    """Each range in a buffer of its own."""
    return [(first, data[first:stop].copy()) for first, stop in ranges]
