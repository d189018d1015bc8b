"""A rank beside sglang's loop: what is answered when, what a reload becomes, and that nothing is raised there."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusync.engines.sglang.rank import Rank
from gpusync.errors import DigestMismatchError
from gpusync.verdict import InDoubtError
from support import sglang_fakes
from support.sglang_fakes import FakeFollower, FakeUpdater

DIRECTORIES = {"source_dir": "/stream", "local_checkpoint_dir": "/local"}
RELOAD = SimpleNamespace(model_path="/local", weight_version="1", load_format="auto", flush_cache=True)


class Loop:
    """sglang's scheduler, as far as a rank knows it."""

    def __init__(self, *, off: str | None = None, flushes: bool = True) -> None:
        self.updater, self.follower = FakeUpdater(flushes=flushes), FakeFollower()
        self.scheduler = SimpleNamespace(weight_updater=self.updater, _engine_paused=False)
        follower: Any = self.follower if off is None else None
        self.rank = Rank(self.scheduler, follower=follower, off=off, facts={}, timeout_s=5)
        self.sent: list[Any] = []

    def start(self, version: int) -> Any:
        argument = json.dumps({"version": version, **DIRECTORIES})
        return self.rank.update(SimpleNamespace(action="prepare", argument=argument))

    def turn(self) -> None:
        self.rank.answer(lambda answer, request: self.sent.append(json.loads(answer.told)))

    def prepare(self, version: int) -> dict[str, Any]:
        assert self.start(version) is None
        self.rank.look(None)
        self.wait()
        return self.sent.pop()

    def wait(self) -> None:
        for _ in range(500):
            self.turn()
            if self.sent:
                return
            threading.Event().wait(0.01)

    def reload(self) -> Any:
        return self.rank.reload(lambda: SimpleNamespace(success=True, message="ordinary"), RELOAD)


@pytest.fixture(autouse=True)
def _no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_fakes.install(monkeypatch)
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))


def test_a_prepare_is_answered_once_when_it_has_ended() -> None:
    loop, goes_on = Loop(), threading.Event()
    loop.follower.preparing = lambda: goes_on.wait(10) and None
    assert loop.start(1) is None
    loop.turn()
    assert loop.sent == []
    assert json.loads(loop.rank.look(None).told)["live"] == 0
    goes_on.set()
    loop.wait()
    (told,) = loop.sent
    assert (told["success"], told["prepared"]) == (True, 1)
    loop.turn()
    assert len(loop.sent) == 1


def test_an_error_of_a_prepare_is_told_with_its_fields() -> None:
    loop = Loop()

    def fail() -> None:
        raise DigestMismatchError("wrong", tensor="lm_head.weight", version=1)

    loop.follower.preparing = fail
    told = loop.prepare(1)
    assert not told["success"]
    assert (told["error"]["type"][0], told["error"]["tensor"]) == ("DigestMismatchError", "lm_head.weight")


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("x")])
def test_whatever_a_prepare_raises_the_loop_goes_on(error: Exception) -> None:
    loop = Loop()

    def fail() -> None:
        raise error

    loop.follower.preparing = fail
    assert type(error).__name__ in loop.prepare(1)["message"]
    loop.follower.preparing = lambda: None
    assert loop.prepare(1)["success"]


def test_a_reload_commits_what_is_prepared_and_is_written_down() -> None:
    loop = Loop()
    loop.prepare(1)
    output = loop.reload()
    assert output.success
    assert "version 1 is live (in place" in output.message
    assert loop.updater.recorded == ["1"]
    assert loop.updater.runner.model_config.model_path == "/local"
    assert loop.updater.fields[0]["model_path"] == "/local"


def test_a_commit_that_fails_is_not_written_down() -> None:
    loop = Loop()
    loop.prepare(1)

    def fail() -> None:
        raise DigestMismatchError("live bytes are wrong")

    loop.follower.committing = fail
    output = loop.reload()
    assert not output.success
    assert "live bytes are wrong" in output.message
    assert loop.updater.recorded == []
    assert loop.updater.runner.model_config.model_path == "/base"


def test_a_cache_that_was_not_flushed_is_told() -> None:
    loop = Loop(flushes=False)
    loop.prepare(1)
    output = loop.reload()
    assert (output.success, output.message) == (False, "the cache was not flushed")
    assert loop.follower.status["live"] == 1


def test_a_reload_with_nothing_prepared_is_the_ordinary_one_on_files_brought_up_to_date() -> None:
    loop = Loop()
    assert loop.reload().message == "ordinary"
    assert loop.follower.events == ["before reload from /local", "forget: the engine has reloaded its weights"]


def test_a_reload_waits_for_a_prepare_under_way() -> None:
    loop, goes_on = Loop(), threading.Event()
    loop.follower.preparing = lambda: goes_on.wait(10) and None
    loop.start(1)
    threading.Timer(0.1, goes_on.set).start()
    assert "version 1 is live" in loop.reload().message


def test_released_weights_are_not_touched() -> None:
    loop = Loop()
    loop.prepare(1)
    loop.updater.offload_tags.add("weights")
    assert "released" in loop.reload().message
    assert "released" in loop.prepare(2)["message"]
    assert loop.follower.status["live"] == 0


def test_other_updates_wait_and_what_is_live_is_forgotten() -> None:
    loop, goes_on = Loop(), threading.Event()
    loop.follower.preparing = lambda: goes_on.wait(10) and None
    loop.start(1)
    threading.Timer(0.1, goes_on.set).start()
    loop.rank.make_way("update_weights_from_tensor")
    assert loop.follower.status["prepared"] == 1
    assert loop.follower.events == ["forget: /update_weights_from_tensor was called"]


def test_a_rank_in_doubt_serves_nothing_until_it_knows() -> None:
    loop = Loop()
    loop.prepare(1)

    def doubt() -> None:
        loop.follower.status = {**loop.follower.status, "in_doubt": "the decision is not known"}
        raise InDoubtError("the decision is not known", transaction="1", phase="commit")

    loop.follower.committing = doubt
    assert not loop.reload().success
    assert loop.scheduler._engine_paused
    loop.prepare(2)
    assert loop.scheduler._engine_paused
    loop.follower.status = {**loop.follower.status, "in_doubt": None}
    loop.prepare(3)
    assert not loop.scheduler._engine_paused


def test_where_it_is_off_the_engine_is_as_it_was() -> None:
    loop = Loop(off="pipeline parallelism")
    assert loop.reload().message == "ordinary"
    loop.rank.make_way("begin_weight_update")
    told = loop.prepare(1)
    assert (told["success"], told["off"]) == (False, "pipeline parallelism")
    assert "pipeline parallelism" in told["message"]
