"""Updates of one engine: what each request means, in which order they run, and when they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gpusync.endpoint.backend import Backend, Outcome, Status, Update
from gpusync.endpoint.confine import Roots, confine
from gpusync.endpoint.counters import Counters
from gpusync.endpoint.errors import RequestError
from gpusync.endpoint.jobs import Job, Jobs, refuse_unless_wanted
from gpusync.endpoint.messages import AbortRequest, CommitRequest, PullRequest
from gpusync.endpoint.threads import call_in_thread

TIMEOUT_S = 900.0
PREPARED_TTL_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The directories of a request that names none."""

    source_dir: str | None = None
    local_checkpoint_dir: str | None = None


class Service:
    """The updates of one engine. All its methods belong to one event loop.

    Every answer comes within `timeout_s`, or UpdateTimeoutError does, with the directory that is waited for. What is
    prepared and not committed within `prepared_ttl_s` is dropped.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        roots: Roots,
        defaults: Defaults = Defaults(),
        timeout_s: float = TIMEOUT_S,
        prepared_ttl_s: float = PREPARED_TTL_S,
    ) -> None:
        self.backend = backend
        self.counters = Counters()
        self._roots, self._defaults = roots, defaults
        self._timeout_s, self._prepared_ttl_s = timeout_s, prepared_ttl_s
        self._jobs: Jobs[Outcome] = Jobs()
        self._resolving: dict[tuple[str, str], asyncio.Task[Path]] = {}
        self._committing = False
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def running(self) -> str | None:
        """The update that runs now, in words."""
        return self._jobs.running

    def status(self) -> Status:
        return self.backend.status()

    def is_ready(self, version: int | None = None) -> bool:
        """Whether what is live is known, and at `version` or beyond. Not while it is being changed."""
        status = self.status()
        if self._committing or status.in_doubt is not None or status.live is None:
            return False
        return version is None or status.live >= version

    async def pull(self, request: PullRequest) -> Outcome:
        """Prepare, and commit if the request says so. Equal requests that overlap are one update."""
        source = _named(request.source_dir, self._defaults.source_dir, "source_dir")
        local = _named(request.local_checkpoint_dir, self._defaults.local_checkpoint_dir, "local_checkpoint_dir")
        version = request.target_version

        async def work(job: Job[Outcome]) -> Outcome:
            job.stage = "resolving the directories"
            update = Update(
                target_version=version,
                source_dir=await self._resolve(source, self._roots.source, self._roots.source_places, "source_dir"),
                local_checkpoint_dir=await self._resolve(
                    local, self._roots.local, self._roots.local_places, "local_checkpoint_dir"
                ),
            )
            return await self._jobs.in_turn(job, lambda: self._prepare(job, update, commit=request.commit))

        key = ("pull", version, source, local, request.commit)
        what = f"{'pulling' if request.commit else 'preparing'} version {version}"
        return await self._run(key, what, work, path=source)

    async def commit(self, request: CommitRequest) -> Outcome:
        version = request.target_version

        async def work(job: Job[Outcome]) -> Outcome:
            return await self._jobs.in_turn(job, lambda: self._commit(job, version))

        return await self._run(("commit", version), f"committing version {version}", work)

    async def abort(self, request: AbortRequest) -> Outcome:
        version = request.target_version

        async def work(job: Job[Outcome]) -> Outcome:
            return await self._jobs.in_turn(job, lambda: self.backend.abort(version))

        return await self._run(("abort", version), "aborting", work)

    async def exclusively(self, what: str, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """`work` in its turn among the updates: for what an engine does to its weights besides."""

        async def in_turn(job: Job[Outcome]) -> Outcome:
            return await self._jobs.in_turn(job, work)

        return await self._run((what, object()), what, in_turn)

    async def _run(
        self,
        key: tuple[object, ...],
        what: str,
        work: Callable[[Job[Outcome]], Awaitable[Outcome]],
        *,
        path: str | None = None,
    ) -> Outcome:
        with self.counters.counted(str(key[0])):
            outcome = await self._jobs.run(key, what, work, timeout_s=self._timeout_s, path=path)
        self.counters.last_report = outcome.report or self.counters.last_report
        return outcome

    async def _prepare(self, job: Job[Outcome], update: Update, *, commit: bool) -> Outcome:
        job.stage = f"reading {update.source_dir} and preparing"
        outcome = await self.backend.prepare(update)
        self._expire_later(outcome.status.prepared)
        if not commit:
            return outcome
        refuse_unless_wanted(job)
        return await self._commit(job, update.target_version)

    async def _commit(self, job: Job[Outcome], version: int) -> Outcome:
        job.stage, self._committing = "committing", True
        try:
            return await self.backend.commit(version)
        finally:
            self._committing = False

    async def _resolve(self, path: str, roots: tuple[Path, ...], places: tuple[Path, ...], what: str) -> Path:
        """One thread for each path at most: a dead filesystem keeps every thread that looks at it."""
        task = self._resolving.get((what, path))
        if task is None:
            work = call_in_thread(lambda: confine(path, roots, places=places, what=what), name="gpusync-resolve")
            task = self._resolving[what, path] = asyncio.ensure_future(work)
            task.add_done_callback(lambda _: self._resolving.pop((what, path)))
        return await asyncio.shield(task)

    def _expire_later(self, version: int | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(self._prepared_ttl_s, self._expire, version) if version is not None else None

    def _expire(self, version: int) -> None:
        if self.status().prepared == version:
            expiring = asyncio.ensure_future(self.abort(AbortRequest(target_version=version)))
            expiring.add_done_callback(lambda done: done.cancelled() or done.exception())


def _named(given: str | None, default: str | None, name: str) -> str:
    if given is not None:
        return given
    if default is None:
        raise RequestError(f"{name} is missing, and this endpoint has no directory of its own for it")
    return default
