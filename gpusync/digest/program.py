"""One rank's part in digesting many tensors together, from who holds what to the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import blake3
import numpy as np

from gpusync.digest.assembled import adler32_digests, assembled_digests, owners_in_turn
from gpusync.digest.blocks import block_digests
from gpusync.digest.exchange import Bytes, Program, Seat, to_all
from gpusync.digest.held import held_digests
from gpusync.digest.intervals import ByTensor, Ints, flat_rows
from gpusync.digest.ownership import Ownership
from gpusync.digest.replicas import (
    FINGERPRINT_BYTES,
    Copies,
    Difference,
    OwnCopies,
    copies_to_compare,
    find_difference,
    odd_one,
)
from gpusync.digest.routes import Routes
from gpusync.digest.shards import Shards, published
from gpusync.digest.supply import Source
from gpusync.errors import LayoutError, PeerFailedError
from gpusync_kernels.segments import SEGMENT, Rows, SegmentTable
from gpusync_kernels.xxh3 import SHORT_BYTES

DIGEST_BYTES = {"xxh3-128": 16, "blake3": 32, "adler32": 4}

TOLD = ("src", "src_offset", "src_stride", "rows", "row_bytes")
FAILED, FINE = b"\x01", b"\x00"
_NO_SHARDS = Shards(names=(), algorithms=(), nbytes=np.zeros(0, np.int64), table=SegmentTable(np.zeros(0, SEGMENT)))


def digest_program(make: Callable[[], Shards], seat: Seat) -> Program[list[str]]:
    """The checksums of all tensors. Raises as `sharded_digests` says; what `make` raises, the others learn."""
    shards = seat.attempts.run(make, lambda: _NO_SHARDS)
    source = seat.attempts.run(shards.source, _NO_SHARDS.source)
    message = seat.attempts.run(partial(_ownership_message, shards, source.layers), bytes)
    told = yield to_all("ownership", _told(seat, message), seat.ranks)
    ownership = Ownership(_read_ownership(_checked(told, seat)), shards.nbytes, shards.names)
    part = _Part(shards, source, ownership, seat)
    finished = yield from part.finish_shared()
    own: list[bytes] = seat.attempts.run(part.digest_held, list)
    told = yield to_all("results", _told(seat, b"".join(finished + own)), seat.ranks)
    part.read_results(_checked(told, seat))
    if part.difference is not None:
        error = yield from find_difference(part.difference, part.copies, seat)
        raise seat.attempts.problem or error
    return [part.digests[tensor].hex() for tensor in range(len(shards.names))]


class _Part:
    """What this rank's holders do. At the end `digests` has all tensors', and `difference` two copies that differ."""

    def __init__(self, shards: Shards, source: Source, ownership: Ownership, seat: Seat) -> None:
        self.seat, self.ownership = seat, ownership
        self.algorithms, self.nbytes = shards.algorithms, shards.nbytes
        self.source = source
        mine = [number for number, holder in enumerate(ownership.holders) if holder[0] == seat.rank]
        self.layers = {h: ByTensor(rows, len(self.nbytes)) for h, rows in zip(mine, source.layers, strict=True)}
        self.copies = OwnCopies(ownership, self.layers, source)
        # routes are planned from what all ranks know; only then this rank's own segments, which may be more, come in
        self.tables = [self._table(rank, dict(enumerate(ownership.rows))) for rank in range(seat.ranks)]
        shared = ownership.distributed
        algorithm = np.array(self.algorithms, dtype=object)[shared]
        by_sums = (algorithm == "xxh3-128") & (self.nbytes[shared] > SHORT_BYTES)
        by_partials = algorithm == "adler32"
        self.routes = Routes(self.tables, shared[by_sums], self.nbytes, ownership.pattern_of)
        self.owners = owners_in_turn(shared[~by_sums & ~by_partials], self.nbytes, self.tables)
        self.adler32 = shared[by_partials]
        self.tables[seat.rank] = self._table(seat.rank, self.layers)
        self.digests: dict[int, bytes] = {}
        self.difference: Difference | None = None

    def finish_shared(self) -> Program[list[bytes]]:
        """The digests that this rank finishes of what nobody has whole, in the order of `_finished_by`."""
        found = yield from block_digests(self.routes, self.tables, self.source, self.seat)
        if self.owners:
            found |= yield from assembled_digests(
                self.algorithms, self.nbytes, self.owners, self.tables, self.source, self.seat
            )
        if len(self.adler32):  # known to every rank
            self.digests |= yield from adler32_digests(self.adler32, self.nbytes, self.tables, self.source, self.seat)
        return [found.get(tensor, b"") for tensor in self._finished_by(self.seat.rank)]

    def digest_held(self) -> list[bytes]:
        """Of each holder the digests of what it has whole, then the fingerprints of what others have as well."""
        found = []
        for holder, table in self.layers.items():
            tensors = self._whole_of(holder)
            names = [self.algorithms[tensor] for tensor in tensors.tolist()]
            rows, budget = table.of(tensors), self.seat.budget_bytes
            found += held_digests(names, self.nbytes[tensors], rows, self.source, budget_bytes=budget)
        return found + self.copies.fingerprints(budget_bytes=self.seat.budget_bytes)

    def read_results(self, told: Sequence[Bytes]) -> None:
        """What every rank found, in the order in which it told it."""
        whole: dict[int, dict[int, bytes]] = {}
        prints: list[Iterator[bytes]] = []
        for rank, message in enumerate(told):
            finished = self._finished_by(rank)
            holders = [number for number, holder in enumerate(self.ownership.holders) if holder[0] == rank]
            held = [(holder, tensor) for holder in holders for tensor in self._whole_of(holder).tolist()]
            sizes = [DIGEST_BYTES[self.algorithms[tensor]] for tensor in [*finished, *(tensor for _, tensor in held)]]
            digests = np.split(message, np.cumsum(sizes))
            self.digests |= {tensor: digest.tobytes() for tensor, digest in zip(finished, digests, strict=False)}
            for (holder, tensor), digest in zip(held, digests[len(finished) : -1], strict=True):
                whole.setdefault(tensor, {})[holder] = digest.tobytes()
            prints.append(iter([bytes(each) for each in digests[-1].reshape(-1, FINGERPRINT_BYTES)]))
        self._compare(whole, prints)

    def _compare(self, whole: dict[int, dict[int, bytes]], prints: Sequence[Iterator[bytes]]) -> None:
        """Takes the digests of tensors that somebody has whole; finds the first tensor with copies that differ."""
        found: list[Difference] = []
        for tensor, digests in sorted(whole.items()):
            pair, nbytes = odd_one(digests), int(self.nbytes[tensor])
            self.digests[tensor] = next(iter(digests.values()))
            if pair is not None:
                copies = Copies(tensor, tuple(digests), flat_rows([0], [nbytes]), nbytes)
                found.append(Difference(copies, *pair))
                break
        for copies in copies_to_compare(self.ownership):
            values = {h: next(prints[self.ownership.holders[h][0]]) for h in copies.holders}
            pair = odd_one(values)
            if pair is not None:
                found.append(Difference(copies, *pair))
                break
        self.difference = min(found, key=lambda each: each.copies.tensor, default=None)

    def _table(self, rank: int, held: dict[int, ByTensor]) -> ByTensor:
        """What a rank has of tensors that nobody has whole, each byte on one rank; `held` by holder."""
        holders = [number for number, (owner, _) in enumerate(self.ownership.holders) if owner == rank]
        parts = [self.ownership.primary_rows(number, held[number].rows) for number in holders]
        return ByTensor(np.concatenate(parts), len(self.nbytes))

    def _finished_by(self, rank: int) -> list[int]:
        by_sums = np.flatnonzero(self.routes.last_rank == rank).tolist()
        return [*by_sums, *(tensor for tensor, owner in self.owners.items() if owner == rank)]

    def _whole_of(self, holder: int) -> Ints:
        return self.ownership.tensors_with([holder in pattern.whole for pattern in self.ownership.patterns])


def _told(seat: Seat, message: bytes) -> Bytes:
    """The message, or the reason why there is none."""
    problem = seat.attempts.message
    text = FINE + message if problem is None else FAILED + problem.encode("utf-8", "replace")
    return np.frombuffer(text, np.uint8)


def _checked(told: Sequence[Bytes], seat: Seat) -> list[Bytes]:
    """The messages of all ranks. Raises this rank's own problem, or who had one."""
    if seat.attempts.problem is not None:
        raise seat.attempts.problem
    failed = {
        rank: bytes(each[1:]).decode("utf-8", "replace") for rank, each in enumerate(told) if each[0] == FAILED[0]
    }
    if failed:
        raise PeerFailedError("digests failed on another rank", ranks=failed)
    return [each[1:] for each in told]


def _ownership_message(shards: Shards, layers: Sequence[Rows]) -> bytes:
    """32 bytes that tell lists of tensors apart | layers i8 | segments i8 x layers | 5 i8 per segment."""
    wanted = json.dumps([shards.names, shards.algorithms]).encode() + shards.nbytes.astype("<i8").tobytes()
    segments = [published(rows) for rows in layers]
    columns = [np.stack([rows[name] for name in TOLD], axis=1) for rows in segments]
    numbers = np.concatenate([np.array([len(layers), *map(len, segments)]), *(each.reshape(-1) for each in columns)])
    return blake3.blake3(wanted).digest() + numbers.astype("<i8").tobytes()


def _read_ownership(told: Sequence[Bytes]) -> list[list[Rows]]:
    """Every rank's layers. Raises `LayoutError` where ranks have other tensors than rank 0."""
    different = [rank for rank, message in enumerate(told) if bytes(message[:32]) != bytes(told[0][:32])]
    if different:
        raise LayoutError(
            "ranks ask for digests of different tensors",
            expected="what rank 0 asks for",
            found=f"others on ranks {different}",
        )
    return [_read_layers(np.frombuffer(bytes(message[32:]), "<i8")) for message in told]


def _read_layers(numbers: Ints) -> list[Rows]:
    count = int(numbers[0])
    lengths = numbers[1 : 1 + count]
    columns = numbers[1 + count :].reshape(-1, len(TOLD))
    rows = np.zeros(len(columns), SEGMENT)
    for column, name in enumerate(TOLD):
        rows[name] = columns[:, column]
    return np.split(rows, np.cumsum(lengths)[:-1])
