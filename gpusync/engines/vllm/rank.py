"""One rank: a worker's weights, followed beside its loop.

A prepare runs in a thread of its own, over gpusync's own connections: the engine waits for every answer of a worker, so
the loop only starts it, and is asked later whether it has ended. A commit runs in the loop. All ranks of a group get
the same calls in the same order, and each step of an update is one that all of them take.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpusync.endpoint.wire import error_as_dict
from gpusync.engines.vllm.follower import Follower
from gpusync.engines.vllm.refusals import is_asleep
from gpusync.errors import RefusedError

LOG = logging.getLogger(__name__)

PREPARE_NICENESS = 10
Told = dict[str, Any]


@dataclass(slots=True)
class Job:
    """A prepare under way. `told` is filled before the thread ends."""

    thread: threading.Thread
    told: Told = field(default_factory=dict)


class Rank:
    """`off`: why gpusync is off on this server; then there is no `follower`. Its methods belong to the worker's loop,
    and none of them raises: vLLM's executor would leave the other ranks' answers behind for the next call."""

    def __init__(
        self, worker: Any, *, follower: Follower | None, off: str | None = None, facts: Mapping[str, Any]
    ) -> None:
        self._worker, self._follower, self.off, self._facts = worker, follower, off, dict(facts)
        self._job: Job | None = None
        self._is_asleep = False

    def prepare(self, argument: Mapping[str, Any]) -> Told:
        """Start it. `poll` tells how it went."""

        def start() -> Told:
            self._refuse_while_preparing()
            thread = threading.Thread(target=lambda: self._run(job, argument), name="gpusync-prepare", daemon=True)
            job = self._job = Job(thread=thread)
            thread.start()
            return {"message": "the prepare has begun"}

        return self._told_of(start)

    def poll(self, _: Mapping[str, Any]) -> Told:
        """What the last prepare has come to; `running` while it runs."""
        job = self._job
        if job is None:
            return self._told_of(_nothing_to_poll)
        return job.told or {"success": True, "running": True}

    def commit(self, argument: Mapping[str, Any]) -> Told:
        return self._in_turn(lambda: self._commit(argument["version"]))

    def abort(self, argument: Mapping[str, Any]) -> Told:
        return self._in_turn(lambda: {"message": self._of_follower().abort(argument["version"])})

    def forget(self, argument: Mapping[str, Any]) -> Told:
        """Something else changes the weights, or takes their memory away, or gives it back."""
        reason = str(argument["reason"])
        if argument.get("asleep") is not None:
            self._is_asleep = bool(argument["asleep"])
        return self._in_turn(lambda: self._forget(reason))

    def look(self, _: Mapping[str, Any]) -> Told:
        return {"success": True, **self.facts()}

    def facts(self) -> Told:
        status = {} if self._follower is None else self._follower.status
        return {**self._facts, "off": self.off, **status}

    def _run(self, job: Job, argument: Mapping[str, Any]) -> None:
        # This thread, and those that it starts: where cores are short, those who are served go first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREPARE_NICENESS)
        job.told = self._told_of(lambda: self._prepare(argument))

    def _prepare(self, argument: Mapping[str, Any]) -> Told:
        self._refuse_while_asleep()
        source_dir, local_checkpoint_dir = Path(argument["source_dir"]), Path(argument["local_checkpoint_dir"])
        message = self._of_follower().prepare(
            argument["version"], source_dir=source_dir, local_checkpoint_dir=local_checkpoint_dir
        )
        return {"message": message}

    def _commit(self, version: int) -> Told:
        self._refuse_while_asleep()
        _synchronise()
        report = self._of_follower().commit(version)
        _synchronise()
        return {"message": f"version {report.version} is live ({report.commit_path}: {report.reason})"}

    def _forget(self, reason: str) -> Told:
        if self._follower is not None:
            self._follower.forget(reason)
        return {"message": reason}

    def _of_follower(self) -> Follower:
        if self._follower is None:
            raise RefusedError("gpusync is off on this server", found=self.off)
        return self._follower

    def _refuse_while_asleep(self) -> None:
        if self._is_asleep or is_asleep(self._worker):
            raise RefusedError("the engine is asleep: the weights' memory is released")

    def _refuse_while_preparing(self) -> None:
        if self._job is not None and self._job.thread.is_alive():
            raise RefusedError("a prepare is still running")

    def _in_turn(self, work: Callable[[], Told]) -> Told:
        def in_turn() -> Told:
            self._refuse_while_preparing()
            return work()

        return self._told_of(in_turn)

    def _told_of(self, work: Callable[[], Told]) -> Told:
        try:
            return {"success": True, **work(), **self.facts()}
        # The rank boundary: the loop goes on, and whoever asked is owed the reason.
        except Exception as error:  # noqa: BLE001
            LOG.warning("gpusync: %s: %s", type(error).__name__, error)
            facts = error_as_dict(error)
            return {"success": False, "message": facts["message"], "error": facts, **self.facts()}


def _nothing_to_poll() -> Told:
    raise RefusedError("no prepare was begun")


def _synchronise() -> None:
    """Everything that the device was given to do is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
