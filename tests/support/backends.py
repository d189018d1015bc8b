"""Ranks as an endpoint sees them, without any: what is prepared and live is a number, and a test decides what fails."""

from __future__ import annotations

import asyncio

from gpusync.endpoint import Outcome, Status, Update
from gpusync.errors import GpusyncError, RefusedError


class FakeBackend:
    """`failures` maps "prepare", "commit" or "abort" to what it raises; `gate` holds a prepare until it is set, or
    `prepare_s` seconds."""

    def __init__(self) -> None:
        self.live: int | None = 0
        self.prepared: int | None = None
        self.in_doubt: str | None = None
        self.calls: list[tuple[str, int | None]] = []
        self.updates: list[Update] = []
        self.failures: dict[str, GpusyncError | Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.prepare_s = 0.0
        self.at_once = 0
        self.most_at_once = 0

    async def prepare(self, update: Update) -> Outcome:
        self.calls.append(("prepare", update.target_version))
        self.updates.append(update)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            await asyncio.sleep(self.prepare_s)
            self._fail("prepare")
        finally:
            self.at_once -= 1
        self.prepared = update.target_version
        return self._outcome("prepared", {"commit_path": "in place"})

    async def commit(self, version: int) -> Outcome:
        self.calls.append(("commit", version))
        self._fail("commit")
        if self.live == version:
            return self._outcome("live already")
        if self.prepared != version:
            raise RefusedError("not what is prepared", version=version, found=self.prepared)
        self.live, self.prepared = version, None
        return self._outcome("committed")

    async def abort(self, version: int | None) -> Outcome:
        self.calls.append(("abort", version))
        self._fail("abort")
        if version in (None, self.prepared):
            self.prepared = None
        return self._outcome("aborted")

    def status(self) -> Status:
        path = None if self.prepared is None else "in place"
        return Status(
            live=self.live, durable=self.live, prepared=self.prepared, commit_path=path, in_doubt=self.in_doubt
        )

    def metrics(self) -> str:
        return "fake_metric 1\n"

    def _fail(self, what: str) -> None:
        if what in self.failures:
            raise self.failures[what]

    def _outcome(self, message: str, report: dict[str, object] | None = None) -> Outcome:
        return Outcome(message=message, status=self.status(), report=report or {})
