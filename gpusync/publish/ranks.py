"""The ranks of one publisher, and how they take a step together: every one succeeds, or every one learns who did not.

Coordination goes over the process group and never over the filesystem, which may show one rank's files to another
late. torch is imported only when there is a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from gpusync.errors import NOWHERE, GpusyncError, PeerFailedError, PublishError, Where

T = TypeVar("T")


class GroupFailedError(PublishError):
    """The process group itself failed: a rank is gone, and what the others know is not known here."""


class Ranks(Protocol):
    """A fixed set of processes that call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. Waits for all of them."""
        ...


class Alone:
    """One process."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]


class GroupRanks:
    """The ranks of a `torch.distributed` process group.

    Values travel over gloo. For a group of another backend a gloo group of the same ranks is made, which every one of
    them has to do: then the constructor is a collective.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        if "gloo" not in dist.get_backend(group):
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._dist = dist
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        try:
            self._dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise GroupFailedError(f"the process group failed, a rank may be gone: {error}") from error
        return values


def open_ranks(group: Any | None) -> Ranks:
    """The ranks of `group`; None is this process alone, whatever `torch.distributed` may be set up for."""
    return Alone() if group is None else GroupRanks(group)


def take_step(ranks: Ranks, what: str, work: Callable[[], T], *, where: Where = NOWHERE) -> list[T]:
    """Do `work` on every rank; returns what it returned, by rank. A collective, also when `work` fails.

    A rank whose work raised raises that again; a rank whose work was fine raises PeerFailedError with the messages of
    those whose was not.
    """
    mine: T | None = None
    problem: Exception | None = None
    try:
        mine = work()
    # The rank boundary: whatever goes wrong becomes a verdict. A rank that left here would keep the others waiting in
    # the collective below.
    except Exception as error:  # noqa: BLE001
        problem = error
    verdicts = ranks.gather((None if problem is None else _message(problem), mine))
    if problem is not None:
        raise problem
    failed = {rank: message for rank, (message, _) in enumerate(verdicts) if message is not None}
    if failed:
        raise PeerFailedError(f"{what} failed on another rank", ranks=failed, where=where)
    return [value for _, value in verdicts]  # type: ignore[misc]


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, GpusyncError) else f"{type(error).__name__}: {error}"
