"""A rank beside a worker's loop: what is answered when, and that nothing is raised there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.engines.vllm.rank import Rank
from gpusync.engines.vllm.worker import WorkerExtension
from gpusync.errors import DigestMismatchError

DIRECTORIES = {"source_dir": "/stream", "local_checkpoint_dir": "/local"}


class FakeFollower:
    """`preparing` runs in place of a prepare, `committing` in place of a commit; either may raise."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"live": 0, "prepared": None, "in_doubt": None}
        self.preparing: Callable[[], object] = lambda: None
        self.committing: Callable[[], object] = lambda: None
        self.forgotten: list[str] = []

    def prepare(self, version: int, *, source_dir: Path, local_checkpoint_dir: Path) -> str:
        assert (str(source_dir), str(local_checkpoint_dir)) == ("/stream", "/local")
        self.preparing()
        self.status = {**self.status, "prepared": version}
        return f"version {version} is prepared"

    def commit(self, version: int) -> Any:
        self.committing()
        self.status = {**self.status, "live": version, "prepared": None}
        return SimpleNamespace(version=version, commit_path="in place", reason="continues the store")

    def abort(self, version: int | None) -> str:
        self.status = {**self.status, "prepared": None}
        return "dropped"

    def forget(self, reason: str) -> None:
        self.forgotten.append(reason)
        self.status = {**self.status, "live": None}


class Worker(WorkerExtension):
    """A worker of vLLM's as far as a rank knows it, and what its executor asks of it."""

    def __init__(self, *, off: str | None = None) -> None:
        self.follower = FakeFollower()
        follower: Any = None if off else self.follower
        self._gpusync_rank = Rank(self, follower=follower, off=off, facts={"engine": "vllm"})

    def ask(self, call: str, **argument: object) -> dict[str, Any]:
        return dict(json.loads(self.gpusync(call, json.dumps(argument))))

    def prepare(self, version: int) -> dict[str, Any]:
        assert self.ask("prepare", version=version, **DIRECTORIES)["success"]
        return self.polled()

    def polled(self) -> dict[str, Any]:
        for _ in range(500):
            told = self.ask("poll")
            if not told.get("running"):
                return told
            time.sleep(0.01)
        raise AssertionError("the prepare has not ended")


def test_a_prepare_is_begun_at_once_and_polled() -> None:
    worker, goes_on = Worker(), threading.Event()
    worker.follower.preparing = lambda: goes_on.wait(10)
    assert worker.ask("prepare", version=1, **DIRECTORIES)["success"]
    assert worker.ask("poll") == {"success": True, "running": True}
    assert worker.ask("look")["live"] == 0
    goes_on.set()
    told = worker.polled()
    assert (told["success"], told["prepared"]) == (True, 1)
    assert worker.ask("poll") == told


@pytest.mark.parametrize("call", ["prepare", "commit", "abort", "forget"])
def test_nothing_else_is_done_while_a_prepare_runs(call: str) -> None:
    worker, goes_on = Worker(), threading.Event()
    worker.follower.preparing = lambda: goes_on.wait(10)
    worker.ask("prepare", version=1, **DIRECTORIES)
    began = time.monotonic()
    told = worker.ask(call, version=1, reason="x", **DIRECTORIES)
    assert time.monotonic() - began < 5, "the engine was held up"
    assert "still running" in told["message"]
    goes_on.set()
    assert worker.polled()["success"]


def test_an_error_of_a_prepare_is_told_with_its_fields() -> None:
    worker = Worker()

    def fail() -> None:
        raise DigestMismatchError("wrong", tensor="lm_head.weight", version=1)

    worker.follower.preparing = fail
    told = worker.prepare(1)
    assert not told["success"]
    assert (told["error"]["type"][0], told["error"]["tensor"]) == ("DigestMismatchError", "lm_head.weight")


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("x"), DigestMismatchError("wrong")])
def test_nothing_is_raised_in_the_loop(error: Exception) -> None:
    worker = Worker()

    def fail() -> None:
        raise error

    worker.follower.preparing = worker.follower.committing = fail
    assert type(error).__name__ in str(worker.prepare(1)["error"])
    assert type(error).__name__ in str(worker.ask("commit", version=1)["error"])


def test_a_call_that_there_is_not_is_answered() -> None:
    worker = Worker()
    assert "no such call" in worker.ask("facts")["message"]
    assert not json.loads(worker.gpusync("look", "not JSON"))["success"]
    assert not worker.ask("commit")["success"]


def test_a_commit_makes_live_what_is_prepared() -> None:
    worker = Worker()
    worker.prepare(1)
    told = worker.ask("commit", version=1)
    assert (told["success"], told["live"], told["prepared"]) == (True, 1, None)
    assert "in place" in told["message"]


def test_no_prepare_and_no_commit_while_the_engine_is_asleep() -> None:
    worker = Worker()
    worker.prepare(1)
    worker.ask("forget", reason="/sleep was called", asleep=True)
    assert worker.follower.forgotten == ["/sleep was called"]
    assert "asleep" in worker.prepare(2)["message"]
    assert "asleep" in worker.ask("commit", version=1)["message"]
    worker.ask("forget", reason="/wake_up was called", asleep=None)
    assert "asleep" in worker.prepare(2)["message"], "the weights are not back"
    worker.ask("forget", reason="/wake_up was called", asleep=False)
    assert worker.prepare(2)["success"]


def test_a_rank_that_is_off_says_why() -> None:
    worker = Worker(off="LoRA: its wrappers rename params")
    assert worker.ask("look")["off"] == "LoRA: its wrappers rename params"
    told = worker.prepare(1)
    assert (told["error"]["type"][0], "LoRA" in told["message"]) == ("RefusedError", True)
    assert worker.ask("forget", reason="x")["success"]
