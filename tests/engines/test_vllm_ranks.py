"""All workers of all data-parallel engines as one backend: whose word counts, and when generation goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.endpoint import Update
from gpusync.endpoint.wire import error_as_dict
from gpusync.engines.vllm.ranks import EXTENSION, Ranks
from gpusync.engines.vllm.settings import Settings
from gpusync.errors import DigestMismatchError, RefusedError

UPDATE = Update(target_version=1, source_dir=Path("/stream"), local_checkpoint_dir=Path("/local"))


class FakeEngine:
    """vLLM's engine client over two engines of two workers. `answers` may change what (engine, worker) says."""

    def __init__(self, *, extension: str = EXTENSION) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
        self.engine_core = self
        self.state = {"off": None, "live": 0, "prepared": None, "in_doubt": None, "commit_path": None}
        self.events: list[str] = []
        self.polls = 0
        self.is_paused_now = False
        self.answers: Callable[[str, int, int, dict[str, Any]], dict[str, Any]] = lambda *args: args[-1]

    async def call_utility_all_async(self, method: str, name: str, timeout: None, args: Any, kwargs: None) -> Any:
        assert (method, name) == ("collective_rpc", "gpusync")
        call, argument = args[0], json.loads(args[1])
        if call != "look":
            self.events.append(call)
        if call == "poll":
            self.polls += 1
            if self.polls < 3:
                return [[json.dumps({"success": True, "running": True})] * 2] * 2
            self.state |= {"prepared": 1, "commit_path": "in place"}
        if call == "commit":
            self.state |= {"live": argument["version"], "prepared": None, "commit_path": None}
        told = {"success": True, "message": call, **self.state}
        return [[json.dumps(self.answers(call, engine, worker, dict(told))) for worker in (0, 1)] for engine in (0, 1)]

    async def is_paused(self) -> bool:
        return self.is_paused_now

    def __getattr__(self, name: str) -> Any:
        async def note(*args: object, **options: object) -> None:
            self.events.append(" ".join([name, *map(str, args), *(f"{key}={each}" for key, each in options.items())]))

        return note


def _ranks(engine: FakeEngine) -> Ranks:
    return Ranks(lambda: engine, settings=Settings())


async def _updated(ranks: Ranks) -> Any:
    await ranks.start()
    await ranks.prepare(UPDATE)
    return await ranks.commit(1)


def _failing(at: str, engine: int, worker: int) -> Callable[..., dict[str, Any]]:
    def answers(call: str, of_engine: int, of_worker: int, told: dict[str, Any]) -> dict[str, Any]:
        if (call, of_engine, of_worker) != (at, engine, worker):
            return told
        error = error_as_dict(DigestMismatchError("wrong", tensor="w", version=1))
        return {**told, "success": False, "message": error["message"], "error": error, "live": 0}

    return answers


def test_an_update_pauses_resets_the_caches_and_goes_on() -> None:
    engine = FakeEngine()
    outcome = asyncio.run(_updated(_ranks(engine)))
    assert (outcome.status.live, outcome.status.prepared) == (1, None)
    assert engine.events == [
        *("start", "prepare", "poll", "poll", "poll"),
        "pause_generation mode=keep clear_cache=False",
        "commit",
        "reset_prefix_cache reset_running_requests=True",
        *("reset_mm_cache", "reset_encoder_cache", "update_weight_version 1"),
        "resume_generation",
    ]


def test_an_engine_that_was_paused_is_neither_paused_nor_woken() -> None:
    engine = FakeEngine()
    engine.is_paused_now = True
    asyncio.run(_updated(_ranks(engine)))
    assert not [event for event in engine.events if event.startswith(("pause", "resume"))]


@pytest.mark.parametrize(("engine", "worker"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_prepare_that_fails_on_any_worker_of_any_engine_has_failed(engine: int, worker: int) -> None:
    client = FakeEngine()
    client.answers = _failing("poll", engine, worker)
    with pytest.raises(DigestMismatchError, match="wrong") as caught:
        asyncio.run(_updated(_ranks(client)))
    assert caught.value.tensor == "w"
    assert "commit" not in client.events


def test_a_commit_that_fails_on_one_engine_leaves_them_all_paused() -> None:
    client = FakeEngine()
    client.answers = _failing("commit", 1, 0)
    with pytest.raises(RefusedError, match=r"differ now.*wrong.*0: 1, 1: 0"):
        asyncio.run(_updated(_ranks(client)))
    assert "resume_generation" not in client.events
    assert "update_weight_version 1" not in client.events


def test_generation_goes_on_when_the_engines_are_of_one_mind_again() -> None:
    client = FakeEngine()
    client.answers = _failing("commit", 1, 0)

    async def twice() -> None:
        ranks = _ranks(client)
        with pytest.raises(RefusedError):
            await _updated(ranks)
        client.answers = lambda *args: args[-1]
        await ranks.prepare(UPDATE)

    asyncio.run(twice())
    assert client.events[-1] == "resume_generation"


@pytest.mark.parametrize("told", [{"live": None}, {"live": None, "in_doubt": "experts are not packed"}])
def test_an_engine_that_may_be_wrong_is_woken_by_the_next_good_commit(told: dict[str, Any]) -> None:
    client = FakeEngine()
    client.answers = lambda call, engine, worker, said: {**_failing("commit", 1, 1)(call, engine, worker, said), **told}

    async def twice() -> None:
        ranks = _ranks(client)
        with pytest.raises((RefusedError, DigestMismatchError)):
            await _updated(ranks)
        assert "resume_generation" not in client.events
        client.is_paused_now = True
        await ranks.prepare(UPDATE)
        assert "resume_generation" not in client.events, "what is live is not known yet"
        client.answers = lambda *args: args[-1]
        client.state["prepared"] = 1
        client.state["live"] = 0
        await ranks.commit(1)

    asyncio.run(twice())
    assert client.events[-1] == "resume_generation"
    assert len([event for event in client.events if event.startswith("pause")]) == 1


def test_what_is_live_already_is_not_committed_again() -> None:
    client = FakeEngine()

    async def twice() -> None:
        ranks = _ranks(client)
        await _updated(ranks)
        client.events.clear()
        outcome = await ranks.commit(1)
        assert "already" in outcome.message
        with pytest.raises(RefusedError, match="not what is prepared"):
            await ranks.commit(2)

    asyncio.run(twice())
    assert client.events == []


def test_workers_without_the_extension_are_never_called() -> None:
    client = FakeEngine(extension="")

    async def refused() -> None:
        ranks = _ranks(client)
        await ranks.start()
        await ranks.refresh()
        with pytest.raises(RefusedError, match="worker-extension-cls"):
            await ranks.prepare(UPDATE)

    asyncio.run(refused())
    assert client.events == []


def test_a_rank_that_is_off_turns_it_off() -> None:
    client = FakeEngine()
    client.answers = lambda call, engine, worker, told: {**told, "off": "LoRA" if (engine, worker) == (1, 1) else None}

    async def refused() -> None:
        ranks = _ranks(client)
        await ranks.start()
        assert ranks.off == "LoRA"
        with pytest.raises(RefusedError, match="LoRA"):
            await ranks.prepare(UPDATE)

    asyncio.run(refused())


def test_nothing_is_known_of_an_engine_that_has_died() -> None:
    client = FakeEngine()

    async def look() -> None:
        ranks = _ranks(client)
        await ranks.start()
        assert (await ranks.refresh()).live == 0

        def die(*_: object) -> dict[str, Any]:
            raise ConnectionError("the engine has died")

        client.answers = die
        assert (await ranks.refresh()).live is None

    asyncio.run(look())
