"""What a transaction needs of the ranks it runs on, and the one step that all of them take together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gpusync.errors import NOWHERE, Where
from gpusync.verdict.hosts import Hosts
from gpusync.verdict.verdict import Decision, Verdict, guard

T = TypeVar("T")
Int64s = npt.NDArray[np.int64]
Readable = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What was exchanged so far: payload of all collectives of data together, as this rank sees it.

    A sum counts its array once, a broadcast its message, a gather the messages of all ranks. `seconds` is time spent
    in them, waiting for others included.
    """

    nbytes: int = 0
    calls: int = 0
    seconds: float = 0.0


class Group(Protocol):
    """A fixed set of ranks that call the same methods in the same order. One thread at a time; others wait their turn.

    A collective is started on gpusync's own connections only, never on the engine's.
    """

    rank: int
    size: int

    @property
    def hosts(self) -> Hosts: ...

    @property
    def leader(self) -> int:
        """The leader on this host."""
        ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, ascending."""
        ...

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank per host, ascending."""
        ...

    @property
    def problem(self) -> str | None:
        """Why the group has to be rebuilt, or to be attached anew; None while all is well."""
        ...

    @property
    def in_doubt(self) -> tuple[str, str] | None:
        """(transaction, phase) of the decision this rank has not learned."""
        ...

    @property
    def traffic(self) -> Traffic: ...

    def begin(self, what: str, *, timeout_s: float) -> str:
        """Begin a transaction; returns its name, which is new and the same on all ranks. A collective.

        Rebuilds the group first if that is needed. All ranks must name the same `what` (say, the version to go to).
        Raises InDoubtError, GroupFailedError, PeerFailedError: then nothing has begun anywhere that serves.
        """
        ...

    def agree(self, verdict: Verdict, *, transaction: str, phase: str, timeout_s: float) -> Decision:
        """The group's decision: ok if every rank's verdict is. A collective.

        Never raises because of another rank: whoever fails, is late or dies makes the decision a failed one, which
        names it. Raises InDoubtError, when this rank gave its ok and cannot learn the decision, which any rank may
        have acted on by then; after that `resolve` comes before anything else.
        """
        ...

    def resolve(self, transaction: str, phase: str, *, timeout_s: float) -> Decision:
        """Learn the decision this rank is in doubt about, from the store; not a collective.

        If nothing was recorded, nobody has acted on it: then this records that it failed. Raises InDoubtError while
        the store cannot be reached.
        """
        ...

    def rebuild(self, *, timeout_s: float) -> None:
        """Connect all ranks anew, those among them that were started again. A collective.

        Raises GroupFailedError naming who did not come.
        """
        ...

    def sum_int64(self, array: Int64s, *, timeout_s: float) -> Int64s:
        """The sum over all ranks, element by element, wrapping around; a new array. Equal shapes on all ranks.

        This and the following are collectives for work that is guarded: they raise PeerFailedError as soon as another
        rank has failed, and GroupFailedError naming who did not come.
        """
        ...

    def broadcast_bytes(self, data: Readable | None, *, source: int, timeout_s: float) -> bytes:
        """Rank `source`'s data, on every rank. What the others pass does not matter."""
        ...

    def gather_bytes(self, data: Readable, *, timeout_s: float) -> list[bytes]:
        """Every rank's data, by rank, on every rank. Any lengths."""
        ...

    def gather_objects(self, value: Any, *, timeout_s: float) -> list[Any]:
        """Every rank's value, by rank, on every rank. It travels as JSON: nothing that arrives is ever unpickled."""
        ...

    def close(self) -> None:
        """Leave. Rank 0 takes the store with it, after it has waited a little for the others to leave as well."""
        ...


def take_step(
    group: Group,
    what: str,
    work: Callable[[], T],
    *,
    transaction: str,
    phase: str,
    timeout_s: float,
    where: Where = NOWHERE,
) -> T:
    """Do `work` on every rank and return its result, if it succeeded on all of them.

    Else every rank raises: its own error where the work failed, PeerFailedError where it did not. InDoubtError as
    `Group.agree`.
    """
    done: list[T] = []
    verdict = guard(lambda: done.append(work()))
    decision = group.agree(verdict, transaction=transaction, phase=phase, timeout_s=timeout_s)
    decision.check(verdict, what=what, where=where)
    return done[0]
