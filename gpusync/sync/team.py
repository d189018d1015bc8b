"""The ranks of one transaction, as each step of it needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from gpusync.sync.report import Clock
from gpusync.verdict import Decision, Group, Verdict, take_step

T = TypeVar("T")


class Team:
    """A group with a time-out for all its waits, and the transaction that is under way."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self._transaction = ""

    def begin(self) -> None:
        """Begin a transaction on all ranks. A collective, as all the following."""
        self._transaction = self.group.begin("a transaction", timeout_s=self.timeout_s)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, of what JSON has, by rank."""
        return self.group.gather_objects(value, timeout_s=self.timeout_s)

    def step(self, what: str, work: Callable[[], T], phase: str, clock: Clock | None = None) -> T:
        """One step of all ranks: its result, if it succeeded on all of them, else every rank raises. With a clock, what
        it takes beyond the work itself is counted as agreeing."""
        began, worked = time.monotonic(), 0.0

        def timed() -> T:
            nonlocal worked
            start = time.monotonic()
            try:
                return work()
            finally:
                worked = time.monotonic() - start

        try:
            return take_step(
                self.group, what, timed, transaction=self._transaction, phase=phase, timeout_s=self.timeout_s
            )
        finally:
            if clock is not None:
                clock.add("agree", time.monotonic() - began - worked)

    def agree(self, verdict: Verdict, phase: str) -> Decision:
        return self.group.agree(verdict, transaction=self._transaction, phase=phase, timeout_s=self.timeout_s)
