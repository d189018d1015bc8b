"""One generation of a group: the connections between a fixed set of processes, from one muster to the next failure."""

from __future__ import annotations

from collections.abc import Iterable

from gpusync.verdict.bounded import Deadline
from gpusync.verdict.channel import Channel, open_channels
from gpusync.verdict.handshake import Roster
from gpusync.verdict.hosts import is_gone
from gpusync.verdict.ledger import Agreement
from gpusync.verdict.link import Address
from gpusync.verdict.verdict import Failure


class Generation:
    """`lost`: why verdicts can no longer be reduced. `stale`: why data can no longer be exchanged. None: they can.

    All ranks count agreements alike, because all take part in all of them.
    """

    def __init__(self, roster: Roster, *, rank: int, verdicts: Channel, data: Channel) -> None:
        self.roster = roster
        self.rank = rank
        self.verdicts = verdicts
        self.data = data
        self.lost: str | None = None
        self.stale: str | None = None
        self._agreements = 0

    @property
    def number(self) -> int:
        return self.roster.generation

    @property
    def upcoming(self) -> Agreement:
        """The next agreement, of which transaction and phase are not known yet."""
        return Agreement(generation=self.number, number=self._agreements, transaction="", phase="")

    def next_agreement(self, *, transaction: str, phase: str) -> Agreement:
        number = self._agreements
        self._agreements += 1
        return Agreement(generation=self.number, number=number, transaction=transaction, phase=phase)

    def find_gone(self) -> set[int]:
        """Ranks whose processes are known to have ended."""
        members = self.roster.members
        mine = members[self.rank].host
        return {rank for rank, of in enumerate(members) if is_gone(of.process, host=of.host, mine=mine)}

    def tell_gone(self) -> str | None:
        """Why nobody need wait any longer. gloo alone may wait for a rank that died before the operation began."""
        gone = sorted(self.find_gone())
        return f"the process of rank {gone[0]} has ended" if gone else None

    def blame(self, ranks: Iterable[int], message: str) -> list[Failure]:
        """Failures of silent ranks. If some are known to be dead, the others wait for them as this one does."""
        silent = set(ranks)
        gone = silent & self.find_gone()
        names = self.roster.hosts.names
        return [
            Failure(rank=rank, host=names[rank], message=message + (", its process has ended" if rank in gone else ""))
            for rank in sorted(gone or silent)
        ]

    def close(self) -> None:
        self.verdicts.close()
        self.data.close()


def connect_generation(address: Address, roster: Roster, *, rank: int, deadline: Deadline) -> Generation:
    """Connect the ranks of a roster. Every one of them has to call it. Raises GroupFailedError.

    When it returns every rank has its connections.
    """
    verdicts, data = open_channels(
        address,
        names=["verdicts", "data"],
        generation=roster.generation,
        rank=rank,
        size=len(roster.members),
        deadline=deadline,
    )
    generation = Generation(roster, rank=rank, verdicts=verdicts, data=data)
    try:
        verdicts.reduce_max([1], deadline=deadline, look=lambda: None)
    except BaseException:
        generation.close()
        raise
    return generation
