"""Checksums of tensors that nobody holds whole, as they stand on the wire, and whether all copies of a byte agree.

    partial, combine      the pieces of one tensor, all in this process
    sharded_digest(s)     over a process group: what has to be exchanged is, and counted; bytes stay where they are

What a call does, on every rank alike: tell who holds what; digest what this rank has whole; make the others from parts;
fingerprint bytes that several have; exchange results; raise on every rank what went wrong on any.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusync.digest.exchange import GroupRanks, Seat, Traffic, run_alone, run_together
from gpusync.digest.program import digest_program
from gpusync.digest.shards import Pieces, ShardedTensor, Shards
from gpusync.errors import LayoutError

BUDGET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """`digests[t]` is tensor t's checksum in lowercase hex, the same on every rank; `traffic` what this rank sent."""

    digests: tuple[str, ...]
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Partial:
    """What one holder has of one tensor, checked. Made by `partial`; reads its buffers when it is combined."""

    shards: Shards = field(repr=False)

    @property
    def algorithm(self) -> str:
        return self.shards.algorithms[0]

    @property
    def nbytes(self) -> int:
        return int(self.shards.nbytes[0])


def partial(algorithm: str, nbytes: int, pieces: Pieces, *, tensor: str = "") -> Partial:
    """The `pieces`, `(byte offset, buffer)`, that one holder has of a tensor of `nbytes` bytes; `tensor` is for errors.

    Raises `UnsupportedFormatError` for an unknown algorithm, `LayoutError` where a piece leaves the tensor.
    """
    return Partial(Shards.of([ShardedTensor(name=tensor, algorithm=algorithm, nbytes=nbytes, pieces=pieces)]))


def combine(algorithm: str, nbytes: int, partials: Sequence[Partial], *, budget_bytes: int = BUDGET_BYTES) -> str:
    """The checksum of the whole tensor from what all holders have of it, in any pieces; what several have is compared.

    Raises `LayoutError` where a byte is missing or a partial is of another tensor, `ReplicaMismatchError` (a
    `DigestMismatchError`) where two have different bytes; its ranks count `partials`.
    """
    expected = (algorithm, operator.index(nbytes))
    for number, each in enumerate(partials):
        if (each.algorithm, each.nbytes) != expected:
            raise LayoutError(
                f"partial {number} is of another tensor", expected=expected, found=(each.algorithm, each.nbytes)
            )
    shards = [each.shards for each in partials] or [partial(algorithm, nbytes, []).shards]
    programs = [
        digest_program(each.itself, Seat(rank=rank, ranks=len(shards), budget_bytes=budget_bytes))
        for rank, each in enumerate(shards)
    ]
    return run_together(programs)[0][0]


def sharded_digests(
    tensors: Sequence[ShardedTensor] | Shards, group: Any | None, *, budget_bytes: int = BUDGET_BYTES
) -> DigestReport:
    """The checksums of many tensors at once, over a `torch.distributed` group with a gloo backend; None: this process.

    A collective: every rank names the same tensors in the same order, each with its own pieces. The number of
    exchanges does not grow with the number of tensors, but with the bytes that are exchanged over `budget_bytes`, which
    bounds the host (and device) memory that is used beside the buffers, or beside what a supply makes; a block of the
    widest tensor has to fit.

    Raises, on every rank: `LayoutError` where a byte is on no rank, or ranks name different tensors;
    `ReplicaMismatchError` where two have different bytes for one tensor (the first such tensor); `PeerFailedError`
    where another rank failed, the error itself on that rank; `BackendUnavailableError` for a group without gloo.
    """

    make = tensors.itself if isinstance(tensors, Shards) else functools.partial(Shards.of, tensors)
    if group is None:
        alone = run_alone(digest_program(make, Seat(rank=0, ranks=1, budget_bytes=budget_bytes)))
        return DigestReport(digests=tuple(alone), traffic=Traffic())
    ranks = GroupRanks(group)
    digests = ranks.run(digest_program(make, Seat(rank=ranks.rank, ranks=ranks.size, budget_bytes=budget_bytes)))
    return DigestReport(digests=tuple(digests), traffic=ranks.traffic)


def sharded_digest(
    algorithm: str,
    nbytes: int,
    pieces: Pieces,
    group: Any | None,
    *,
    tensor: str = "",
    traffic: Traffic | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> str:
    """`sharded_digests` of one tensor. What was sent is added to `traffic`."""
    item = ShardedTensor(name=tensor, algorithm=algorithm, nbytes=nbytes, pieces=pieces)
    report = sharded_digests([item], group, budget_bytes=budget_bytes)
    if traffic is not None:
        traffic.add(report.traffic)
    return report.digests[0]
