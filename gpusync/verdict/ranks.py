"""The ranks of an engine, each in its process: the group that decides over gloo and a store of its own."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from gpusync.errors import GpusyncError
from gpusync.verdict.bounded import Deadline
from gpusync.verdict.decide import STORE_GRACE_S, decide
from gpusync.verdict.errors import GroupFailedError, InDoubtError, StoreLostError
from gpusync.verdict.exchange import Exchange
from gpusync.verdict.generation import Generation, connect_generation
from gpusync.verdict.group import Int64s, Readable, Traffic
from gpusync.verdict.handshake import Hello, Roster
from gpusync.verdict.hosts import Hosts
from gpusync.verdict.ledger import Agreement, Ledger
from gpusync.verdict.link import Address
from gpusync.verdict.muster import join_muster, lead_muster
from gpusync.verdict.seat import Seat
from gpusync.verdict.verdict import OK, Decision, Failure, Verdict

T = TypeVar("T")


class RankGroup:
    """Implements `Group`; there the methods are described. Made by `open_group`."""

    def __init__(self, seat: Seat, hello: Hello, generation: Generation) -> None:
        self.rank = seat.rank
        self.size = len(generation.roster.members)
        self._seat = seat
        self._hello = hello
        self._generation = generation
        self._ledger = Ledger(seat.link, rank=self.rank, size=self.size)
        self._exchange = Exchange(self._ledger)
        self._begun = 0
        self._doubt: Agreement | None = None
        self._turn = threading.RLock()

    @property
    def hosts(self) -> Hosts:
        return self._generation.roster.hosts

    @property
    def leader(self) -> int:
        return self.hosts.leader_of(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.leader == self.rank

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.hosts.ranks_beside(self.rank)

    @property
    def leaders(self) -> tuple[int, ...]:
        return self.hosts.leaders

    @property
    def roster(self) -> Roster:
        """What every rank said of itself at the last muster."""
        return self._generation.roster

    @property
    def store_address(self) -> Address:
        return self._seat.address

    @property
    def problem(self) -> str | None:
        return self._seat.link.problem or self._generation.lost or self._generation.stale

    @property
    def in_doubt(self) -> tuple[str, str] | None:
        return None if self._doubt is None else (self._doubt.transaction, self._doubt.phase)

    @property
    def traffic(self) -> Traffic:
        return self._exchange.traffic

    def begin(self, what: str, *, timeout_s: float) -> str:
        with self._turn:
            self._refuse_in_doubt()
            deadline = Deadline(timeout_s)
            if self._needs_rebuild():
                self.rebuild(timeout_s=deadline.left_s())
            decision, transaction = self._agree_to_begin(what, deadline)
            if not decision.ok and self._generation.lost is not None and not deadline.expired:
                # Another rank may have known of a loss that this one has only learned now.
                self.rebuild(timeout_s=deadline.left_s())
                decision, transaction = self._agree_to_begin(what, deadline)
            decision.check(OK, what=f"beginning {what}")
            return transaction

    def _agree_to_begin(self, what: str, deadline: Deadline) -> tuple[Decision, str]:
        transaction = f"{self._generation.number}.{self._begun}"
        self._begun += 1
        timeout_s = max(deadline.left_s(), 0.001)
        try:
            return self.agree(OK, transaction=transaction, phase=f"begin {what}", timeout_s=timeout_s), transaction
        except InDoubtError as error:
            # Nothing is done in a transaction that has only begun, so there is no doubt to resolve.
            self._doubt = None
            self._generation.lost = str(error)
            raise GroupFailedError(f"beginning {what} failed: {error}", missing=(0,)) from error

    def agree(self, verdict: Verdict, *, transaction: str, phase: str, timeout_s: float) -> Decision:
        with self._turn:
            self._refuse_in_doubt()
            agreement = self._generation.next_agreement(transaction=transaction, phase=phase)
            # Until the decision is known, whatever may interrupt this thread.
            self._doubt = agreement
            generation, ledger = self._generation, self._ledger
            try:
                decision = decide(verdict, agreement, generation=generation, ledger=ledger, timeout_s=timeout_s)
            except InDoubtError:
                raise
            except BaseException:
                # It is not known whether this rank took part in the all-reduce, nor so which one its next would be.
                generation.lost = "an agreement was interrupted"
                raise
            self._doubt = None
            return decision

    def resolve(self, transaction: str, phase: str, *, timeout_s: float) -> Decision:
        with self._turn:
            doubt = self._doubt
            if doubt is None or (doubt.transaction, doubt.phase) != (transaction, phase):
                raise GpusyncError(
                    "this rank is not in doubt about that", expected=self.in_doubt, found=(transaction, phase)
                )
            veto = Failure(
                rank=self.rank,
                host=self.hosts.names[self.rank],
                message=f"had not learned the decision on {doubt}, and nobody had recorded one",
            )
            try:
                decision = self._ledger.record(doubt, [veto], deadline=Deadline(timeout_s))
            except StoreLostError as error:
                raise InDoubtError(
                    f"the decision on {doubt} is not known here: {error}", transaction=transaction, phase=phase
                ) from error
            self._doubt = None
            return decision

    def rebuild(self, *, timeout_s: float) -> None:
        with self._turn:
            self._refuse_in_doubt()
            deadline = Deadline(timeout_s)
            old = self._generation
            old.lost = old.lost or "the group is being rebuilt"
            with contextlib.suppress(StoreLostError):
                # Whoever does not know yet, and waits in an agreement, has to come too.
                self._ledger.mark_lost(old.upcoming, old.lost, deadline=Deadline(min(STORE_GRACE_S, timeout_s)))
            old.close()
            self._hello = replace(self._hello, nonce=uuid.uuid4().hex)
            roster = self._muster(deadline)
            roster.check()
            self._generation = connect_generation(self._seat.address, roster, rank=self.rank, deadline=deadline)
            self._begun = 0

    def _muster(self, deadline: Deadline) -> Roster:
        link, hello = self._seat.link, self._hello
        if self.rank == 0:
            return lead_muster(link, hello, size=self.size, deadline=deadline)
        return join_muster(link, hello, rank=self.rank, size=self.size, deadline=deadline, has_moved=lambda: False)

    def sum_int64(self, array: Int64s, *, timeout_s: float) -> Int64s:
        return self._in_turn(lambda: self._exchange.sum_int64(self._generation, array, Deadline(timeout_s)))

    def broadcast_bytes(self, data: Readable | None, *, source: int, timeout_s: float) -> bytes:
        return self._in_turn(
            lambda: self._exchange.broadcast_bytes(self._generation, data, source, Deadline(timeout_s))
        )

    def gather_bytes(self, data: Readable, *, timeout_s: float) -> list[bytes]:
        return self._in_turn(lambda: self._exchange.gather(self._generation, data, Deadline(timeout_s)))

    def gather_objects(self, value: Any, *, timeout_s: float) -> list[Any]:
        return self._in_turn(lambda: self._exchange.gather_objects(self._generation, value, Deadline(timeout_s)))

    def count_keys(self, *, timeout_s: float) -> int:
        """How many keys the group's store holds."""
        with self._turn:
            return self._ledger.count_keys(deadline=Deadline(timeout_s))

    def close(self) -> None:
        with self._turn:
            is_whole = self.problem is None and self._doubt is None
            self._generation.lost = self._generation.lost or "the group was closed"
            self._generation.close()
            self._seat.leave(self._generation.roster if is_whole else None)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_turn(self, work: Callable[[], T]) -> T:
        with self._turn:
            self._refuse_in_doubt()
            return work()

    def _needs_rebuild(self) -> bool:
        if self._generation.lost is not None or self._generation.stale is not None:
            return True
        return self._ledger.read_lost(self._generation.upcoming, deadline=Deadline(STORE_GRACE_S)) is not None

    def _refuse_in_doubt(self) -> None:
        if self._doubt is not None:
            raise InDoubtError(
                f"this rank does not know the decision on {self._doubt}: resolve it first",
                transaction=self._doubt.transaction,
                phase=self._doubt.phase,
            )
