"""One rank: a scheduler's weights, followed beside its loop.

A prepare runs in a thread of its own, over gpusync's own connections; the loop only starts it, and answers when it has
ended. A commit runs inside the loop, where sglang's reload would. All ranks of a group get the same requests in the same
order, and each step of an update is one that all of them take.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpusync.endpoint.wire import error_as_dict
from gpusync.engines.sglang import messages
from gpusync.engines.sglang.follower import Follower
from gpusync.engines.sglang.refusals import find_obstacle, find_refusal, read_setting
from gpusync.engines.sglang.settings import read_settings
from gpusync.errors import GpusyncError, RefusedError
from gpusync.verdict import InDoubtError, open_group

LOG = logging.getLogger(__name__)

Told = dict[str, Any]


@dataclass(slots=True)
class Job:
    """A prepare under way, and the request that waits for it. `told` is filled before the thread ends."""

    request: Any
    thread: threading.Thread | None = None
    told: Told = field(default_factory=dict)
    is_answered: bool = False


class Rank:
    """`off`: why gpusync is off on this server; the same reason on every rank."""

    def __init__(self, scheduler: Any, *, follower: Follower | None, off: str | None, facts: Mapping[str, Any]) -> None:
        self._scheduler, self._updater = scheduler, scheduler.weight_updater
        self._follower, self.off, self._facts = follower, off, dict(facts)
        self._job: Job | None = None
        self._paused_in_doubt = False

    # what the HTTP process asks

    def update(self, request: Any) -> Any:
        """Start a prepare and answer later, or abort and answer now."""
        import json

        argument = json.loads(request.argument)
        self._wait_for_job()
        if request.action == "prepare":
            self._job = Job(request=request)
            work = lambda: self._prepare(**argument)  # noqa: E731
            self._job.thread = threading.Thread(target=self._run, args=(self._job, work), name="gpusync-prepare")
            self._job.thread.daemon = True
            self._job.thread.start()
            return None
        return self._answer_of(self._guarded(lambda: self._abort(argument["version"])))

    def look(self, request: Any) -> Any:
        return messages.build("GpusyncLookReqOutput", told=self.facts())

    def answer(self, send: Callable[[Any, Any], None]) -> None:
        """Called by every turn of the loop: the answer to a prepare that has ended, once."""
        job = self._job
        if job is not None and job.told and not job.is_answered:
            job.is_answered = True
            send(self._answer_of(job.told), job.request)

    def facts(self) -> Told:
        follower = self._follower
        live: Told = {} if follower is None else dict(follower.status)
        running = self._job is not None and not self._job.told
        return {**self._facts, "off": self.off, "preparing": running, **live}

    # inside the loop

    def reload(self, ordinary: Callable[[], Any], request: Any) -> Any:
        """sglang's reload from disk: the commit of what is prepared for it, or else an ordinary one. Never raises, as
        the loop would end."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        self._wait_for_job()
        if self._follower is None:
            return ordinary()
        told = self._guarded(lambda: self._reload(ordinary, request))
        if "output" in told:
            return told["output"]
        return UpdateWeightFromDiskReqOutput(success=told["success"], message=str(told["message"]))

    def make_way(self, name: str) -> None:
        """Before something else changes the weights or takes their memory away."""
        self._wait_for_job()
        if self._follower is not None:
            self._follower.forget(f"/{name} was called")

    def _reload(self, ordinary: Callable[[], Any], request: Any) -> Told:
        follower = self._of_follower()
        commits, why = follower.would_commit(request.model_path, request.weight_version)
        if not commits:
            LOG.info("gpusync: an ordinary reload from %s: %s", request.model_path, why)
            follower.before_reload(request.model_path)
            output = ordinary()
            follower.forget("the engine has reloaded its weights")
            return {"output": output}
        self._refuse_if_obstructed()
        try:
            self._synchronise()
            report = follower.commit(lambda directory: self._load(directory, request))
            self._synchronise()
        except InDoubtError:
            # Ranks may differ now: nothing may be served until the decision is known.
            self._scheduler._engine_paused = self._paused_in_doubt = True
            raise
        self._resume()
        self._record(request, report.version)
        success, message = self._updater.flush_cache_after_weight_update(
            request, True, f"version {report.version} is live ({report.commit_path}: {report.reason})"
        )
        return {"success": success, "message": message}

    def _load(self, directory: Path, request: Any) -> None:
        """sglang's ordinary reload, of every runner."""
        for role, runner in self._updater._select_runners("all"):
            success, message = runner.weight_updater.update_weights_from_disk(str(directory), request.load_format)
            if not success:
                raise GpusyncError(f"the engine's reload of its {role} model failed: {message}", path=directory)

    def _record(self, request: Any, version: int) -> None:
        """What sglang's reload writes down: where the weights come from, and which they are."""
        from sglang.srt.configs.load_config import LoadConfig

        for _, runner in self._updater._select_runners("all"):
            runner.model_config.model_path = request.model_path
            runner.update_model_fields(
                runner.model,
                model_path=request.model_path,
                load_format=request.load_format,
                load_config=LoadConfig(load_format=request.load_format),
            )
        named = request.weight_version
        self._updater.record_weight_version_after_update(str(version) if named is None else named)

    def _synchronise(self) -> None:
        """What the device has been given to do is done."""
        torch.get_device_module().synchronize()

    def _resume(self) -> None:
        if self._paused_in_doubt:
            self._scheduler._engine_paused = self._paused_in_doubt = False

    # the prepare's thread

    def _prepare(self, version: int, source_dir: str, local_checkpoint_dir: str) -> Told:
        self._refuse_if_obstructed()
        prepared = self._of_follower().prepare(
            version, source_dir=Path(source_dir), local_checkpoint_dir=Path(local_checkpoint_dir)
        )
        return {"success": True, "message": prepared, **self.facts()}

    def _abort(self, version: int | None) -> Told:
        return {"success": True, "message": self._of_follower().abort(version), **self.facts()}

    def _refuse_if_obstructed(self) -> None:
        obstacle = find_obstacle(self._updater)
        if obstacle is not None:
            raise RefusedError(obstacle)

    def _of_follower(self) -> Follower:
        if self._follower is None:
            raise RefusedError(f"gpusync is off on this server: {self.off}")
        return self._follower

    def _run(self, job: Job, work: Callable[[], Told]) -> None:
        job.told = self._guarded(work)

    def _wait_for_job(self) -> None:
        """Whatever comes next finds the last prepare ended, on every rank."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()

    def _guarded(self, work: Callable[[], Told]) -> Told:
        try:
            return work()
        # The rank boundary: the engine's loop must go on, and the caller is owed the reason.
        except Exception as error:
            LOG.warning("gpusync: %s: %s", type(error).__name__, error)
            facts = error_as_dict(error)
            return {"success": False, "message": facts["message"], "error": facts, **self.facts()}

    def _answer_of(self, told: Told) -> Any:
        return messages.build("GpusyncUpdateReqOutput", success=bool(told["success"]), told=told)


def start_rank(scheduler: Any, *, hooked: bool) -> Rank:
    """Look whether gpusync can work here, and agree on that with the group's other ranks. Never raises: whatever is
    wrong turns gpusync off, with the reason, and the server serves."""
    updater = scheduler.weight_updater
    group = updater.tp_cpu_group
    group = group if torch.distributed.get_world_size(group) > 1 else None
    facts: Told = {"engine": "sglang"}
    follower, problem = None, None if hooked else "some of sglang's functions could not be hooked: see the log"
    try:
        settings = read_settings()
        problem = problem or find_refusal(scheduler, read_setting(scheduler)) or _derived_cache_error(updater)
        if problem is None:
            follower = Follower.of(updater._select_runners("all"), group=group, settings=settings)
            facts |= follower.facts
    # The rank boundary: see above.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    try:
        wait_s = read_settings().handshake_timeout_s if follower is not None else 60.0
        open_group(group, local_checkpoint_dir="/", timeout_s=wait_s, problem=problem).close()
    except GpusyncError as error:
        LOG.warning("gpusync is off, and this server serves without it: %s", error)
        return Rank(scheduler, follower=None, off=str(error), facts=facts)
    LOG.info("gpusync follows %s: %s", facts.get("base_dir"), facts.get("bytes_by_class"))
    return Rank(scheduler, follower=follower, off=None, facts=facts)


def _derived_cache_error(updater: Any) -> str | None:
    """sglang's own word on caches that no update in place can keep right."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    say = getattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda model: None)
    reasons = (say(runner.model) for _, runner in updater._select_runners("all"))
    return next((str(reason) for reason in reasons if reason is not None), None)
