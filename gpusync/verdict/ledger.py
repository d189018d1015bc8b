"""What the group's store knows of its agreements: who posted which verdict, and what was decided.

One store belongs to one attach. Keys, for agreement number `n` of generation `g`:

    verdict/g/n/rank    what the rank posted, before it took part in the all-reduce
    decision/g/n        written once, by whoever is first; it holds, whatever anybody else has found
    alarm/g/n           a rank failed on the way to this agreement: whoever exchanges data may stop
    here/g/what/rank    the rank lives, and has seen a collective fail
    lost/g              the connections of this generation are of no more use

Transaction and phase stand in the verdicts. They are not in the keys, so that ranks that have come to decide on
different things find each other there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpusync.verdict.bounded import Deadline
from gpusync.verdict.link import StoreLink
from gpusync.verdict.verdict import (
    Decision,
    Failure,
    PostedVerdict,
    Verdict,
    encode_failures,
    encode_verdict,
    parse_failures,
    parse_verdict,
)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    generation: int
    number: int
    transaction: str
    phase: str

    @property
    def tag(self) -> int:
        """62 bits that are equal only if the ranks decide on the same thing."""
        text = json.dumps([self.generation, self.number, self.transaction, self.phase])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def __str__(self) -> str:
        return f"phase `{self.phase}` of transaction `{self.transaction}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    rank: int
    message: str


class Ledger:
    def __init__(self, link: StoreLink, *, rank: int, size: int) -> None:
        self._link = link
        self._rank = rank
        self._size = size
        # Keys to be deleted, each with the agreement after which nobody needs it.
        self._garbage: list[tuple[Agreement, str]] = []

    def post(self, agreement: Agreement, verdict: Verdict, *, deadline: Deadline) -> None:
        """The store has the verdict when this returns; of a failed one also the alarm."""
        if self._rank == 0:
            self._garbage.append((agreement, _decision_key(agreement)))
        if not verdict.ok:
            self.raise_alarm(agreement, str(verdict.message), deadline=deadline)
        text = encode_verdict(verdict, transaction=agreement.transaction, phase=agreement.phase)
        self._write(agreement, _verdict_key(agreement, self._rank), text, deadline)

    def read_posted(self, agreement: Agreement, *, deadline: Deadline) -> dict[int, PostedVerdict]:
        """By rank, of those that posted."""
        posted = {}
        for rank in range(self._size):
            text = self._link.read(_verdict_key(agreement, rank), deadline=deadline)
            if text is not None:
                posted[rank] = parse_verdict(text)
        return posted

    def record(self, agreement: Agreement, failures: Iterable[Failure], *, deadline: Deadline) -> Decision:
        """Record a decision, ok without failures, unless there is one. Returns the one that holds."""
        held = self._link.record(_decision_key(agreement), encode_failures(failures), deadline=deadline)
        return self._as_decision(agreement, held)

    def read_decision(self, agreement: Agreement, *, deadline: Deadline) -> Decision | None:
        held = self._link.read(_decision_key(agreement), deadline=deadline)
        return None if held is None else self._as_decision(agreement, held)

    def raise_alarm(self, agreement: Agreement, message: str, *, deadline: Deadline) -> None:
        text = json.dumps({"rank": self._rank, "message": message})
        self._write(agreement, _alarm_key(agreement), text, deadline)

    def read_alarm(self, agreement: Agreement, *, deadline: Deadline) -> Alarm | None:
        """Another rank's alarm."""
        text = self._link.read(_alarm_key(agreement), deadline=deadline)
        alarm = None if text is None else Alarm(**json.loads(text))
        return None if alarm is None or alarm.rank == self._rank else alarm

    def mark_lost(self, agreement: Agreement, reason: str, *, deadline: Deadline) -> None:
        """The connections of the agreement's generation are lost."""
        self._write(agreement, _lost_key(agreement), f"rank {self._rank}: {reason}", deadline)

    def read_lost(self, agreement: Agreement, *, deadline: Deadline) -> str | None:
        return self._link.read(_lost_key(agreement), deadline=deadline)

    def call_roll(
        self, agreement: Agreement, what: str, *, find_gone: Callable[[], set[int]], deadline: Deadline
    ) -> set[int]:
        """Who does not answer until the deadline. For those that `find_gone` knows to be dead it does not wait.

        Every rank in which the same collective failed calls it, and answers by that.
        """
        keys = {rank: f"here/{agreement.generation}/{what}/{rank}" for rank in range(self._size)}
        self._write(agreement, keys[self._rank], "1", deadline)
        silent = set(keys)
        while True:
            silent = {rank for rank in silent if self._link.read(keys[rank], deadline=deadline) is None}
            gone = find_gone()
            if silent <= gone or deadline.expired:
                return silent | gone
            time.sleep(min(_POLL_S, deadline.left_s()))

    def sweep(self, agreement: Agreement, *, deadline: Deadline) -> None:
        """Delete what earlier transactions left.

        Only after an all-reduce of `agreement` has completed: by then every rank has learned all earlier decisions.
        """
        moment = (agreement.generation, agreement.transaction)
        old = {key: None for of, key in self._garbage if (of.generation, of.transaction) != moment}
        for key in old:
            self._link.delete(key, deadline=deadline)
        self._garbage = [(of, key) for of, key in self._garbage if key not in old]

    def count_keys(self, *, deadline: Deadline) -> int:
        return self._link.count_keys(deadline=deadline)

    def _write(self, agreement: Agreement, key: str, text: str, deadline: Deadline) -> None:
        # Before it is written: it may be there even if writing it fails.
        self._garbage.append((agreement, key))
        self._link.record(key, text, deadline=deadline)

    def _as_decision(self, agreement: Agreement, held: str) -> Decision:
        decision = Decision(
            transaction=agreement.transaction,
            phase=agreement.phase,
            rank=self._rank,
            failures=parse_failures(held),
        )
        if not decision.ok and self._rank == 0:
            # Rank 0 clears up after all, for those that died.
            self._garbage += [(agreement, _verdict_key(agreement, rank)) for rank in range(1, self._size)]
            self._garbage.append((agreement, _alarm_key(agreement)))
        return decision


def _verdict_key(agreement: Agreement, rank: int) -> str:
    return f"verdict/{agreement.generation}/{agreement.number}/{rank}"


def _decision_key(agreement: Agreement) -> str:
    return f"decision/{agreement.generation}/{agreement.number}"


def _alarm_key(agreement: Agreement) -> str:
    return f"alarm/{agreement.generation}/{agreement.number}"


def _lost_key(agreement: Agreement) -> str:
    return f"lost/{agreement.generation}"
