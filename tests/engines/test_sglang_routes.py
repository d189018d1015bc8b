"""The routes on sglang's HTTP server: ours before theirs, and theirs while gpusync is off."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.endpoint import Update
from gpusync.engines.sglang import server
from gpusync.engines.sglang.plugin import _reload_in_turn
from gpusync.engines.sglang.ranks import Ranks as RealRanks
from support import sglang_fakes

ASKED = {"source_dir": "/stream", "local_checkpoint_dir": "/local", "target_version": 3}


class Ranks:
    """Answers of one group of ranks, as sglang's communicators bring them."""

    def __init__(self, *, off: str | None = None) -> None:
        self.off, self.asked = off, []
        self.info: dict[str, object] = {}
        self.manager = SimpleNamespace(
            auto_create_handle_loop=lambda: None,
            gpusync_look_communicator=self._look,
            gpusync_update_communicator=self._update,
        )

    async def _look(self, request: Any) -> list[Any]:
        return [SimpleNamespace(told=json.dumps({"off": self.off, "live": 2, "durable": 2, "prepared": None}))]

    async def _update(self, request: Any) -> list[Any]:
        self.asked.append((request.action, json.loads(request.argument)))
        told = {"success": True, "message": "version 3 is prepared", "live": 2, "durable": 3, "prepared": 3}
        return [SimpleNamespace(told=json.dumps(told))]


class App:
    """The little of FastAPI's application that is used."""

    def __init__(self, *paths: str) -> None:
        routes = [SimpleNamespace(path=path, endpoint=None, handle=f"theirs {path}") for path in paths]
        self.router = SimpleNamespace(routes=routes)

    def add_route(self, path: str, endpoint: Any, methods: list[str]) -> None:
        self.router.routes.append(SimpleNamespace(path=path, endpoint=endpoint, methods=methods))

    def call(self, method: str, path: str, body: bytes = b"", token: str | None = None) -> Any:
        route = next(route for route in self.router.routes if route.path == path)
        return asyncio.run(route.endpoint(_request(method, path, body, token)))


def _request(method: str, path: str, body: bytes, token: str | None) -> Any:
    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    path, _, query = path.partition("?")
    return SimpleNamespace(
        method=method, url=SimpleNamespace(path=path, query=query), headers=headers, stream=stream, body=body
    )


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> Any:
    sglang_fakes.install(monkeypatch)
    monkeypatch.setattr(server, "Gauges", lambda: None)

    def mount(app: App, ranks: Ranks) -> App:
        module = sys.modules["sglang.srt.entrypoints"].http_server
        vars(module).update(
            app=app,
            Response=SimpleNamespace,
            _global_state=SimpleNamespace(tokenizer_manager=ranks.manager, scheduler_info=ranks.info),
        )
        server.mount()
        return app

    return mount


def test_a_pull_reaches_the_ranks(mounted: Any) -> None:
    ranks = Ranks()
    app = mounted(App("/generate"), ranks)
    reply = app.call("POST", "/pull_weights", json.dumps(ASKED).encode())
    told = json.loads(reply.content)
    assert (reply.status_code, told["success"], told["prepared"]) == (200, True, 3)
    (asked,) = ranks.asked
    assert asked == ("prepare", {"version": 3, "source_dir": "/stream", "local_checkpoint_dir": "/local"})


def test_ours_comes_before_a_route_of_the_same_path_and_gives_way_while_off(mounted: Any) -> None:
    ranks = Ranks()
    app = mounted(App("/pull_weights"), ranks)
    assert app.call("POST", "/pull_weights", json.dumps(ASKED).encode()).status_code == 200
    ranks.off = "pipeline parallelism"
    assert app.call("POST", "/pull_weights", json.dumps(ASKED).encode()) == "theirs /pull_weights"
    told = json.loads(app.call("GET", "/weights/engine").content)
    assert (told["success"], told["message"]) == (False, "gpusync is off: pipeline parallelism")


def test_a_reload_waits_for_a_prepare(mounted: Any) -> None:
    order: list[str] = []
    ranks = Ranks()
    update = ranks.manager.gpusync_update_communicator

    async def slow(request: Any) -> Any:
        await asyncio.sleep(0.05)
        order.append("prepared")
        return await update(request)

    async def reload(manager: Any) -> None:
        order.append("reloaded")

    async def both() -> None:
        preparing = asyncio.ensure_future(seen.prepare(asked))
        await asyncio.sleep(0)
        await _reload_in_turn(reload, ranks.manager)
        await preparing

    ranks.manager.gpusync_update_communicator = slow
    seen = RealRanks(lambda: ranks.manager, get_off=lambda: None)
    asked = Update(target_version=3, source_dir=Path("/stream"), local_checkpoint_dir=Path("/local"))
    asyncio.run(both())
    assert order == ["prepared", "reloaded"]


def test_ranks_that_may_not_understand_are_sent_nothing(mounted: Any) -> None:
    ranks = Ranks()
    ranks.info["gpusync_off"] = "rank 1 did not come"
    ranks.manager = SimpleNamespace()
    app = mounted(App(), ranks)
    reply = app.call("POST", "/pull_weights", json.dumps(ASKED).encode())
    assert reply.status_code == 400
    assert "rank 1 did not come" in json.loads(reply.content)["message"]
    assert json.loads(app.call("GET", "/weights/version").content)["live"] is None
    assert app.call("GET", "/weights/ready").status_code == 503


def test_the_engines_metrics_stay_its_own(mounted: Any) -> None:
    app = mounted(App("/metrics"), Ranks())
    assert [route.path for route in app.router.routes].count("/metrics") == 1


def test_directories_are_confined_and_a_token_is_asked_for(mounted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSYNC_SOURCE_ROOTS", "/shared")
    monkeypatch.setenv("GPUSYNC_TOKEN", "secret")
    ranks = Ranks()
    app = mounted(App(), ranks)
    body = json.dumps(ASKED).encode()
    assert app.call("POST", "/pull_weights", body).status_code == 401
    reply = app.call("POST", "/pull_weights", body, token="secret")
    assert reply.status_code == 400
    assert "source_dir is not allowed" in json.loads(reply.content)["message"]
    assert ranks.asked == []


def test_a_body_of_any_length_is_not_read_to_its_end(mounted: Any) -> None:
    reply = mounted(App(), Ranks()).call("POST", "/pull_weights", b" " * 100_000)
    assert reply.status_code == 413
