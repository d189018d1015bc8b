"""Bytes that several holders have: fingerprints of each copy, which copy is the odd one, and where it differs.

A copy is fingerprinted as a byte string of its own (XXH3-128), so it does not matter how a holder has it in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from gpusync.digest.exchange import Bytes, Program, Seat, to_all
from gpusync.digest.fragments import read_bytes
from gpusync.digest.held import held_digests
from gpusync.digest.intervals import ByTensor, Ints, flat_rows, packed_in_order, restrict, singles_of
from gpusync.digest.ownership import Ownership
from gpusync.digest.supply import CUT_BYTES, Source
from gpusync.errors import DigestMismatchError
from gpusync_kernels.segments import Rows, clip_source
from gpusync_kernels.xxh3 import BLOCK_BYTES

FINGERPRINT = "xxh3-128"
FINGERPRINT_BYTES = 16

PARTS = 64  # compared at a time while a difference is looked for
SHOWN_BYTES = PARTS * CUT_BYTES  # from here on the bytes themselves are exchanged


class ReplicaMismatchError(DigestMismatchError):
    """Two holders have different bytes for one tensor, first at `first_byte`; `rank` has others than `like_rank`.

    Which of them are wrong nobody can say here: those that are alike may be few, or the first.
    """

    def __init__(
        self, *, tensor: str, rank: int, like_rank: int, first_byte: int, expected: object, found: object
    ) -> None:
        self.rank, self.like_rank, self.first_byte = rank, like_rank, first_byte
        who = f"rank {rank} has other bytes than rank {like_rank}"
        if rank == like_rank:
            who = f"rank {rank} has two copies with different bytes"
        what = f"{who}, first at byte {first_byte} in block {first_byte // BLOCK_BYTES}"
        super().__init__(what, tensor=tensor, expected=expected, found=found)


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of one tensor (source side of `region`, of `nbytes` bytes) and everyone who has them."""

    tensor: int
    holders: tuple[int, ...]
    region: Rows
    nbytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two of the holders of some copies, whose fingerprints differ."""

    copies: Copies
    holder: int
    like: int


class OwnCopies:
    """What one rank's holders have of copies: `tables[h]` are the segments of holder h, a layer of `source`."""

    def __init__(self, ownership: Ownership, tables: dict[int, ByTensor], source: Source) -> None:
        self.ownership, self.tables, self.source = ownership, tables, source

    def fingerprints(self, *, budget_bytes: int) -> list[bytes]:
        """In the order of `copies_to_compare`, of each the holders of this rank."""
        parts = [flat_rows([], [])]
        sizes: list[int] = []
        for copies in copies_to_compare(self.ownership):
            for holder in copies.holders:
                if holder in self.tables:
                    rows = self.packed(copies, holder)
                    rows["src"] = len(sizes)
                    parts.append(rows)
                    sizes.append(copies.nbytes)
        strings = np.concatenate(parts)
        names = [FINGERPRINT] * len(sizes)
        return held_digests(names, np.array(sizes, np.int64), strings, self.source, budget_bytes=budget_bytes)

    def packed(self, copies: Copies, holder: int) -> Rows:
        """Where the holder has the bytes of a copy, source positions counted through these bytes."""
        rows = self.tables[holder].slice(copies.tensor).copy()
        if int((rows["rows"] * rows["row_bytes"]).sum()) != copies.nbytes:
            rows = restrict(rows, copies.region)
        return packed_in_order(rows)


def copies_to_compare(ownership: Ownership) -> Iterator[Copies]:
    """All bytes that several holders have, but for tensors that several have whole: they compare digests."""
    sizes = [[int((r.region["rows"] * r.region["row_bytes"]).sum()) for r in p.replicas] for p in ownership.patterns]
    for tensor in ownership.tensors_with([bool(pattern.replicas) for pattern in ownership.patterns]).tolist():
        number = int(ownership.pattern_of[tensor])
        for replicas, nbytes in zip(ownership.patterns[number].replicas, sizes[number], strict=True):
            yield Copies(tensor, replicas.holders, replicas.region, nbytes)


def odd_one(values: dict[int, bytes]) -> tuple[int, int] | None:
    """`(holder, like)`: the first that has not the most common value (the first one's, in a tie), and one that has."""
    if len(set(values.values())) <= 1:
        return None
    most = max(Counter(values.values()).values())
    common = next(value for value in values.values() if list(values.values()).count(value) == most)
    odd = next(holder for holder, value in values.items() if value != common)
    return odd, next(holder for holder, value in values.items() if value == common)


def find_difference(difference: Difference, own: OwnCopies, seat: Seat) -> Program[ReplicaMismatchError]:
    """The error that says where two copies differ: fingerprints of 64 parts at a time, then the bytes of one."""
    pair = (difference.like, difference.holder)
    packed = {h: own.packed(difference.copies, h) for h in pair if h in own.tables}
    talk = _Talk(pair, [own.ownership.holders[h][0] for h in pair], seat)
    first, stop = 0, difference.copies.nbytes
    while stop - first > SHOWN_BYTES:
        edges = np.linspace(first, stop, PARTS + 1).astype(np.int64)
        edges[1:-1] -= edges[1:-1] % CUT_BYTES
        prints = partial(_prints, packed, edges, own.source, seat.budget_bytes)
        parts = yield from talk.both(prints, PARTS * FINGERPRINT_BYTES)
        worst = int(np.argmax((parts[0] != parts[1]).reshape(PARTS, -1).any(axis=1)))
        first, stop = int(edges[worst]), int(edges[worst + 1])
    shown = yield from talk.both(partial(_shown, packed, first, stop, own.source), stop - first)
    differs = int(np.argmax(shown[0] != shown[1]))
    return ReplicaMismatchError(
        tensor=own.ownership.names[difference.copies.tensor],
        rank=talk.ranks_of[1],
        like_rank=talk.ranks_of[0],
        first_byte=_position(difference.copies.region, first + differs),
        expected=f"0x{shown[0][differs]:02x}",
        found=f"0x{shown[1][differs]:02x}",
    )


@dataclass(frozen=True, slots=True)
class _Talk:
    """Two holders show all ranks something; `ranks_of` are the ranks they are on, maybe the same."""

    pair: tuple[int, int]
    ranks_of: list[int]
    seat: Seat

    def both(self, show: Callable[[int], Bytes], nbytes: int) -> Program[tuple[Bytes, Bytes]]:
        """What both show, `nbytes` each."""
        lengths = [self.ranks_of.count(rank) * nbytes for rank in range(self.seat.ranks)]
        mine = [h for h, rank in zip(self.pair, self.ranks_of, strict=True) if rank == self.seat.rank]
        payload = self.seat.attempts.run(
            lambda: np.concatenate([np.zeros(0, np.uint8), *map(show, mine)]),
            lambda: np.zeros(lengths[self.seat.rank], np.uint8),
        )
        received = yield to_all("search", payload, self.seat.ranks, incoming=lengths)
        left, right = received[self.ranks_of[0]], received[self.ranks_of[1]]
        return left[:nbytes], right[-nbytes:]


def _prints(packed: dict[int, Rows], edges: Ints, source: Source, budget_bytes: int, holder: int) -> Bytes:
    parts = [_window(packed[holder], edges[i], edges[i + 1], i) for i in range(PARTS)]
    found = held_digests(
        [FINGERPRINT] * PARTS, np.diff(edges), np.concatenate(parts), source, budget_bytes=budget_bytes
    )
    return np.frombuffer(b"".join(found), np.uint8)


def _shown(packed: dict[int, Rows], first: int, stop: int, source: Source, holder: int) -> Bytes:
    return read_bytes(_window(packed[holder], first, stop), source, stop - first)


def _window(rows: Rows, first: int, stop: int, number: int = 0) -> Rows:
    """What lies in [first, stop), positions counted from there, as string `number`."""
    rows = clip_source(rows, np.full(len(rows), first), np.full(len(rows), stop))
    rows["src_offset"] -= first
    rows["src"] = number
    return rows


def _position(region: Rows, byte: int) -> int:
    """Where in the tensor byte number `byte` of a region is."""
    single = singles_of(region)
    stops = np.cumsum(single["row_bytes"])
    row = int(np.searchsorted(stops, byte, "right"))
    return int(single["src_offset"][row] + byte - (stops[row] - single["row_bytes"][row]))
