"""How ranks exchange bytes while they digest together: rounds that all of them take part in.

What a rank does is a generator: it yields a `Round` and is sent what every rank gave it. So the same program runs over
a process group, alone, or with all ranks in one process. torch is imported only where there is a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gpusync.errors import BackendUnavailableError, GpusyncError, PeerFailedError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

LENGTH_BYTES = 8  # told ahead of a payload whose length is not known to the receiver


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank sent to others, by what they were; counts once per receiver. Adds up over calls.

    `ownership`: who holds what. `sums`: 64 bytes per XXH3 block. `accumulators`: 64 bytes handed from rank to rank.
    `words`: bytes of words cut by a boundary, and of last stripes. `whole`: bytes of tensors that are put together.
    `partials`: adler32. `results`: digests, fingerprints of replicas, verdicts. `search`: where replicas differ.
    `rounds` is how many exchanges there were.
    """

    ownership: int = 0
    sums: int = 0
    accumulators: int = 0
    words: int = 0
    whole: int = 0
    partials: int = 0
    results: int = 0
    search: int = 0
    rounds: int = 0

    @property
    def nbytes(self) -> int:
        return int(sum(dataclasses.astuple(self))) - self.rounds

    def add(self, other: Traffic) -> None:
        for part in dataclasses.fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def count(self, sent: Mapping[str, int]) -> None:
        self.rounds += 1
        for kind, nbytes in sent.items():
            setattr(self, kind, getattr(self, kind) + nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One exchange. `outgoing[r]` goes to rank r (what a rank has for itself comes back to it).

    `incoming[r]` is how many bytes rank r has for this one; None when that is not known beforehand. `sent`: bytes to
    other ranks by kind, as `Traffic` names them.
    """

    outgoing: Sequence[Bytes]
    incoming: Sequence[int] | None
    sent: Mapping[str, int]


Program = Generator[Round, list[Bytes], T]


def to_all(kind: str, payload: Bytes, ranks: int, *, incoming: Sequence[int] | None = None) -> Round:
    """The same bytes from this rank to every rank."""
    length_bytes = 0 if incoming is not None else LENGTH_BYTES
    sent = {kind: (payload.size + length_bytes) * (ranks - 1)}
    return Round(outgoing=[payload] * ranks, incoming=incoming, sent=sent)


class Attempts:
    """Work between rounds. A rank whose work failed stays in step with the others, sending what means nothing, until
    the round that carries the verdicts: if it left, they would wait for it.
    """

    def __init__(self) -> None:
        self.problem: Exception | None = None

    def run(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What `work` returns; once anything has failed, what `otherwise` returns."""
        if self.problem is None:
            try:
                return work()
            # The rank boundary: whatever goes wrong becomes a verdict.
            except Exception as error:  # noqa: BLE001
                self.problem = error
        return otherwise()

    @property
    def message(self) -> str | None:
        if self.problem is None or isinstance(self.problem, GpusyncError):
            return None if self.problem is None else str(self.problem)
        return f"{type(self.problem).__name__}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a program runs: one rank of several, with a budget for the memory it takes beside its buffers."""

    rank: int
    ranks: int
    budget_bytes: int
    attempts: Attempts = field(default_factory=Attempts)


def nothing() -> None:
    """What work that returns nothing is replaced by when it failed."""


class GroupFailedError(PeerFailedError):
    """The process group itself failed, a rank may be gone; which one, nobody told: `ranks` is empty."""

    def __init__(self, error: Exception) -> None:
        GpusyncError.__init__(self, f"the process group failed, a rank may be gone: {error}")
        self.ranks = {}


def run_alone(program: Program[T]) -> T:
    """A program of one rank."""
    return run_together([program])[0]


def run_together(programs: Sequence[Program[T]], traffic: Sequence[Traffic] | None = None) -> list[T]:
    """All ranks in this process, round by round. Raises what a rank raised, its own rather than what it told others."""
    results: dict[int, T] = {}
    failed: list[GpusyncError] = []
    replies: list[list[Bytes]] | None = None
    while True:
        rounds: list[Round] = []
        for rank, program in enumerate(programs):
            try:
                rounds.append(_advance(program, None if replies is None else replies[rank]))
            except StopIteration as done:
                results[rank] = done.value
            except GpusyncError as error:
                failed.append(error)
        if len(rounds) < len(programs):
            break
        for sent, counted in zip(rounds, traffic or (), strict=False):
            counted.count(sent.sent)
        replies = [[each.outgoing[rank] for each in rounds] for rank in range(len(programs))]
        _check_sizes(rounds, replies)
    if failed:
        raise min(failed, key=lambda error: isinstance(error, PeerFailedError))
    return [results[rank] for rank in range(len(programs))]


def _check_sizes(rounds: Sequence[Round], replies: Sequence[Sequence[Bytes]]) -> None:
    """What arrives has to be what was awaited: over a group it would be taken for it."""
    for awaited, reply in zip(rounds, replies, strict=True):
        sizes = [payload.size for payload in reply]
        if awaited.incoming is not None and sizes != list(awaited.incoming):
            raise RuntimeError(f"ranks are out of step: {sizes} bytes arrive, expected {list(awaited.incoming)}")


@dataclass(slots=True)
class GroupRanks:
    """The ranks of a `torch.distributed` process group with a gloo backend."""

    group: Any
    traffic: Traffic = field(default_factory=Traffic)
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        import torch.distributed as dist

        backend = str(dist.get_backend_config(self.group))
        if "gloo" not in backend:
            raise BackendUnavailableError("digests are exchanged over gloo", expected="a gloo group", found=backend)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def run(self, program: Program[T]) -> T:
        reply: list[Bytes] | None = None
        while True:
            try:
                sent = _advance(program, reply)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                reply = self._exchange(sent)
            except RuntimeError as error:
                raise GroupFailedError(error) from error
            self.traffic.count(sent.sent)

    def _exchange(self, sent: Round) -> list[Bytes]:
        sizes = [payload.size for payload in sent.outgoing]
        if sent.incoming is None:
            lengths = [LENGTH_BYTES] * self.size
            told = self._all_to_all(np.array(sizes, "<i8").view(np.uint8), lengths, lengths)
            incoming = told.view("<i8").tolist()
        else:
            incoming = list(sent.incoming)
        # what a rank has for itself does not travel
        sizes[self.rank] = incoming[self.rank] = 0
        payload = np.concatenate([each for rank, each in enumerate(sent.outgoing) if rank != self.rank] or [_NOTHING])
        received = self._all_to_all(payload, incoming, sizes)
        parts = np.split(received, np.cumsum(incoming)[:-1])
        parts[self.rank] = sent.outgoing[self.rank]
        return parts

    def _all_to_all(self, payload: Bytes, incoming: Sequence[int], outgoing: Sequence[int]) -> Bytes:
        import torch
        import torch.distributed as dist

        received = np.empty(sum(incoming), np.uint8)
        dist.all_to_all_single(
            torch.from_numpy(received), torch.from_numpy(payload), list(incoming), list(outgoing), group=self.group
        )
        return received


_NOTHING: Bytes = np.empty(0, np.uint8)


def _advance(program: Program[T], reply: list[Bytes] | None) -> Round:
    return next(program) if reply is None else program.send(reply)
