"""Digests that are not made from block sums: of whole tensors put together on one rank, and from adler32's partials.

For tensors that several ranks hold parts of. Short tensors and blake3 are exchanged whole; adler32 adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from gpusync.digest.algorithms import Digest, new_digest
from gpusync.digest.exchange import Bytes, Program, Round, Seat, nothing, to_all
from gpusync.digest.fragments import ByteBatch, Fragments, byte_batches
from gpusync.digest.held import adler32_sums
from gpusync.digest.intervals import ByTensor, Ints, singles_of
from gpusync.digest.supply import Source
from gpusync_kernels.adler32 import MODULUS, adler32_checksums
from gpusync_kernels.segments import clip_source, per_source

_BYTE_COST = 3.0  # gathered, sent, put together
_FRAGMENT_COST = 512.0  # what every rank knows of each

PARTIAL_BYTES = 8


def owners_in_turn(tensors: Ints, nbytes: Ints, tables: Sequence[ByTensor]) -> dict[int, int]:
    """Who puts each tensor together: of the ranks with most of its bytes, the one with the least to do so far."""
    work = [0] * len(tables)
    found = {}
    for tensor in tensors.tolist():
        held = [int((rows["rows"] * rows["row_bytes"]).sum()) for rows in (table.slice(tensor) for table in tables)]
        rank = min((rank for rank, size in enumerate(held) if size == max(held)), key=lambda rank: work[rank])
        work[rank] += int(nbytes[tensor]) + 1
        found[tensor] = rank
    return found


def assembled_digests(
    algorithms: Sequence[str],
    nbytes: Ints,
    owners: dict[int, int],
    tables: Sequence[ByTensor],
    source: Source,
    seat: Seat,
) -> Program[dict[int, bytes]]:
    """The digests of the tensors that `owners` gives to this rank. Every byte that others hold travels once."""
    running = {t: new_digest(algorithms[t]) for t, owner in owners.items() if owner == seat.rank}
    tensors = np.array(sorted(owners), np.int64)
    fragments = np.sum([_singles_by_tensor(table, tensors, len(nbytes)) for table in tables], axis=0)
    cost = _BYTE_COST + _FRAGMENT_COST * fragments / np.maximum(nbytes, 1)
    owner_of = np.array([owners.get(t, -1) for t in range(len(nbytes))], np.int64)
    for batch in byte_batches(tensors, nbytes, cost, seat.budget_bytes):
        owner = owner_of[batch.tensors]
        place = _places_of(batch, owner, seat.ranks)
        sent = [_fragments(table, batch, place, owner) for table in tables]
        sizes = sent[seat.rank].sizes(seat.ranks)
        outgoing = seat.attempts.run(partial(sent[seat.rank].gather, source, seat.ranks), partial(_zeros, sizes))
        received = yield Round(
            outgoing=outgoing,
            incoming=[each.sizes(seat.ranks)[seat.rank] for each in sent],
            sent={"whole": sum(sizes) - sizes[seat.rank]},
        )
        seat.attempts.run(partial(_absorb, received, sent, batch, place, owner, seat.rank, running), nothing)
    return {tensor: bytes.fromhex(digest.hexdigest()) for tensor, digest in running.items()}


def adler32_digests(
    tensors: Ints, nbytes: Ints, tables: Sequence[ByTensor], source: Source, seat: Seat
) -> Program[dict[int, bytes]]:
    """The checksums of `tensors`, on every rank: each gives its partials, 8 bytes for a tensor that it has bytes of."""
    sizes = nbytes[tensors]
    held = [(table.starts[tensors + 1] > table.starts[tensors]) for table in tables]

    def partials() -> Bytes:
        sums = adler32_sums(tables[seat.rank].of(tensors), sizes, source)
        return np.ascontiguousarray(sums[held[seat.rank]].astype("<u4")).reshape(-1).view(np.uint8)

    lengths = [int(each.sum()) * PARTIAL_BYTES for each in held]
    payload = seat.attempts.run(partials, lambda: np.zeros(lengths[seat.rank], np.uint8))
    received = yield to_all("partials", payload, seat.ranks, incoming=lengths)
    total = np.zeros((len(tensors), 2), np.int64)
    for some, part in zip(held, received, strict=True):
        total[some] += np.ascontiguousarray(part).view("<u4").reshape(-1, 2)
    checksums = adler32_checksums(sizes, total % MODULUS).tolist()
    return {tensor: value.to_bytes(4, "big") for tensor, value in zip(tensors.tolist(), checksums, strict=True)}


def _zeros(sizes: Sequence[int]) -> list[Bytes]:
    return [np.zeros(size, np.uint8) for size in sizes]


def _singles_by_tensor(table: ByTensor, tensors: Ints, count: int) -> Ints:
    rows = table.of(tensors)
    singles = np.zeros(count, np.int64)
    np.add.at(singles, tensors[rows["src"]], rows["rows"])
    return singles


def _places_of(batch: ByteBatch, owner: Ints, ranks: int) -> Ints:
    """Where each window begins in what its owner puts together."""
    sizes, place = batch.stop - batch.first, np.zeros(len(owner), np.int64)
    for rank in range(ranks):
        some = owner == rank
        place[some] = np.cumsum(sizes[some]) - sizes[some]
    return place


def _fragments(table: ByTensor, batch: ByteBatch, place: Ints, owner: Ints) -> Fragments:
    rows = table.of(batch.tensors)
    rows = singles_of(clip_source(rows, per_source(batch.first, rows), per_source(batch.stop, rows)))
    rows["src_offset"] += (place - batch.first)[rows["src"]]
    return Fragments.of(rows, owner[rows["src"]])


def _absorb(
    received: Sequence[Bytes],
    sent: Sequence[Fragments],
    batch: ByteBatch,
    place: Ints,
    owner: Ints,
    rank: int,
    running: dict[int, Digest],
) -> None:
    """What came from everyone, in its place, to the digests of this rank."""
    sizes = batch.stop - batch.first
    assembly = np.zeros(int(sizes[owner == rank].sum()), np.uint8)
    for payload, fragments in zip(received, sent, strict=True):
        fragments.scatter(payload, rank, assembly)
    for number in np.flatnonzero(owner == rank).tolist():
        window = assembly[place[number] : place[number] + sizes[number]]
        running[int(batch.tensors[number])].update(window)
