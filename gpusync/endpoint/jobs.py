"""One update at a time. Equal requests that overlap are one job, and each of them gets its answer.

A job that waits for its turn is dropped when nobody waits for it any more: a caller that was told of a time-out must
not find its request done behind its back later. One that runs goes on, and whoever asks again joins it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from gpusync.endpoint.errors import UpdateTimeoutError
from gpusync.errors import GpusyncError

T = TypeVar("T")


class Job(Generic[T]):
    """`stage` says what it is at, for those who grow impatient. `is_wanted`: somebody waits for it."""

    def __init__(self, what: str) -> None:
        self.what, self.stage = what, "starting"
        self.waiting, self.started = 0, False
        self.task: asyncio.Task[T]

    @property
    def is_wanted(self) -> bool:
        return self.waiting > 0


class Jobs(Generic[T]):
    """`running` names the job whose turn it is."""

    def __init__(self) -> None:
        self.running: str | None = None
        self._jobs: dict[Hashable, Job[T]] = {}
        self._turn = asyncio.Lock()

    async def run(
        self,
        key: Hashable,
        what: str,
        work: Callable[[Job[T]], Awaitable[T]],
        *,
        timeout_s: float,
        path: str | None = None,
    ) -> T:
        """What `work` makes of it, in its turn. Raises UpdateTimeoutError after `timeout_s`, naming `path`."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(what)
            job.task = asyncio.ensure_future(work(job))
            job.task.add_done_callback(lambda _: self._forget(key, job))
        job.waiting += 1
        try:
            return await asyncio.wait_for(asyncio.shield(job.task), timeout_s)
        except asyncio.TimeoutError as error:
            if job.task.done():
                raise
            raise UpdateTimeoutError(
                f"{what} has not ended within {timeout_s:.3g} s", path=path, found=job.stage
            ) from error
        finally:
            job.waiting -= 1
            if not job.is_wanted and not job.started:
                self._forget(key, job)
                job.task.cancel()

    async def in_turn(self, job: Job[T], work: Callable[[], Awaitable[T]]) -> T:
        """`work`, when no other job is at it."""
        if self.running is not None:
            job.stage = f"waiting for its turn behind {self.running}"
        async with self._turn:
            job.started, job.stage, self.running = True, "running", job.what
            try:
                return await work()
            finally:
                self.running = None

    def _forget(self, key: Hashable, job: Job[T]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]
        if job.task.done() and not job.task.cancelled():
            job.task.exception()  # looked at: where everybody has gone, asyncio would complain that nobody did


def refuse_unless_wanted(job: Job[T]) -> None:
    """Before a step that its caller would notice: none is taken for callers that have all gone."""
    if not job.is_wanted:
        raise GpusyncError(f"{job.what} was given up: nobody waits for it any more")
