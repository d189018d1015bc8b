"""One rank: a scheduler's weights, followed beside its loop.

A prepare runs in a thread of its own, over gpusync's own connections; the loop only starts it, and answers when it has
ended. A commit runs inside the loop, where sglang's reload would. All ranks of a group get the same requests in the
same order, and each step of an update is one that all of them take.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusync.endpoint.wire import error_as_dict
from gpusync.engines.sglang import messages
from gpusync.engines.sglang.follower import Follower
from gpusync.engines.sglang.records import load_runners, record_reload, synchronise
from gpusync.engines.sglang.refusals import find_obstacle
from gpusync.errors import GpusyncError, RefusedError
from gpusync.verdict import InDoubtError

LOG = logging.getLogger(__name__)

Told = dict[str, Any]


@dataclass(slots=True)
class Job:
    """A prepare under way, and the request that waits for it. `told` is filled before the thread ends."""

    request: Any
    thread: threading.Thread
    told: Told = field(default_factory=dict)
    is_answered: bool = False


class Rank:
    """`off`: why gpusync is off on this server; then there is no `follower`. Its methods belong to the loop's thread,
    and none of them raises: an error would end the loop, and the server."""

    def __init__(
        self, scheduler: Any, *, follower: Follower | None, off: str | None, facts: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._scheduler, self._updater = scheduler, scheduler.weight_updater
        self._follower, self.off, self._facts = follower, off, dict(facts)
        self._timeout_s = timeout_s
        self._job: Job | None = None
        self._is_fenced = False

    def update(self, request: Any) -> Any:
        """Start a prepare, which is answered when it has ended; or abort, and answer."""
        argument = json.loads(request.argument)
        if request.action == "prepare":
            return self._start(request, argument)
        return _answer_of(self._guarded(lambda: self._abort(argument["version"])))

    def look(self, request: Any) -> Any:
        return messages.build("GpusyncLookReqOutput", told=self.facts())

    def answer(self, send: Callable[[Any, Any], None]) -> None:
        """Called by every turn of the loop: the answer to a prepare that has ended, once."""
        job = self._job
        if job is None or not job.told or job.is_answered:
            return
        job.is_answered = True
        self._lift_fence()
        send(_answer_of(job.told), job.request)

    def facts(self) -> Told:
        status = {} if self._follower is None else self._follower.status
        return {**self._facts, "off": self.off, **status}

    def reload(self, ordinary: Callable[[], Any], request: Any) -> Any:
        """sglang's reload from disk: the commit of what is prepared for it, or else the `ordinary` one."""
        if self._follower is None:
            return ordinary()
        told = self._guarded(lambda: self._reload(ordinary, request))
        return told["output"] if "output" in told else _reload_output(told)

    def make_way(self, what: str) -> None:
        """Before something else changes the weights, or takes their memory away."""
        if self._follower is not None:
            follower = self._follower
            self._guarded(lambda: self._forget(follower, f"/{what} was called"))

    def _start(self, request: Any, argument: Mapping[str, Any]) -> Any:
        try:
            self._wait_for_job()
        except GpusyncError as error:
            return _answer_of(self._failure(error))
        thread = threading.Thread(target=lambda: self._run(job, argument), name="gpusync-prepare", daemon=True)
        job = self._job = Job(request=request, thread=thread)
        thread.start()
        return None

    def _run(self, job: Job, argument: Mapping[str, Any]) -> None:
        job.told = self._told_of(lambda: self._prepare(argument))

    def _prepare(self, argument: Mapping[str, Any]) -> Told:
        self._refuse_if_obstructed()
        follower = self._of_follower()
        source_dir, local_checkpoint_dir = Path(argument["source_dir"]), Path(argument["local_checkpoint_dir"])
        message = follower.prepare(
            argument["version"], source_dir=source_dir, local_checkpoint_dir=local_checkpoint_dir
        )
        return {"message": message, **self.facts()}

    def _abort(self, version: int | None) -> Told:
        return {"message": self._of_follower().abort(version), **self.facts()}

    def _forget(self, follower: Follower, reason: str) -> Told:
        follower.forget(reason)
        return {"message": reason}

    def _reload(self, ordinary: Callable[[], Any], request: Any) -> Told:
        follower = self._of_follower()
        why_not = follower.why_no_commit(request.model_path, request.weight_version)
        if why_not is not None:
            LOG.info("gpusync: an ordinary reload from %s: %s", request.model_path, why_not)
            follower.before_reload(request.model_path)
            follower.forget("the engine has reloaded its weights")
            return {"message": why_not, "output": ordinary()}
        self._refuse_if_obstructed()
        return self._commit(follower, request)

    def _commit(self, follower: Follower, request: Any) -> Told:
        synchronise()
        try:
            report = follower.commit(lambda directory: load_runners(self._updater, directory, request.load_format))
        except InDoubtError:
            # Ranks may differ now: this one serves nothing until it knows.
            self._is_fenced = self._scheduler._engine_paused = True
            raise
        synchronise()
        record_reload(self._updater, request, report.version)
        done = f"version {report.version} is live ({report.commit_path}: {report.reason})"
        success, message = self._updater.flush_cache_after_weight_update(request, True, done)
        return {"success": success, "message": message}

    def _lift_fence(self) -> None:
        if self._is_fenced and self._follower is not None and self._follower.status["in_doubt"] is None:
            self._is_fenced = self._scheduler._engine_paused = False

    def _refuse_if_obstructed(self) -> None:
        obstacle = find_obstacle(self._updater)
        if obstacle is not None:
            raise RefusedError(obstacle)

    def _of_follower(self) -> Follower:
        if self._follower is None:
            raise RefusedError("gpusync is off on this server", found=self.off)
        return self._follower

    def _guarded(self, work: Callable[[], Told]) -> Told:
        """In the loop: when the last prepare has ended, on every rank."""

        def in_turn() -> Told:
            self._wait_for_job()
            return work()

        return self._told_of(in_turn)

    def _told_of(self, work: Callable[[], Told]) -> Told:
        try:
            return {"success": True, **work()}
        # The rank boundary: the loop goes on, and whoever asked is owed the reason.
        except Exception as error:  # noqa: BLE001
            return self._failure(error)

    def _failure(self, error: Exception) -> Told:
        LOG.warning("gpusync: %s: %s", type(error).__name__, error)
        facts = error_as_dict(error)
        return {"success": False, "message": facts["message"], "error": facts, **self.facts()}

    def _wait_for_job(self) -> None:
        if self._job is None:
            return
        self._job.thread.join(self._timeout_s)
        if self._job.thread.is_alive():
            raise RefusedError(f"a prepare has not ended within {self._timeout_s:.3g} s")


def _answer_of(told: Told) -> Any:
    return messages.build("GpusyncUpdateReqOutput", success=bool(told["success"]), told=told)


def _reload_output(told: Told) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    return UpdateWeightFromDiskReqOutput(success=bool(told["success"]), message=str(told["message"]))
