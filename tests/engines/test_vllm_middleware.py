"""The middleware in front of vLLM's API server: what it answers itself, what passes, and what the ranks are told of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from gpusync.engines.vllm import server
from gpusync.engines.vllm.ranks import EXTENSION

Message = MutableMapping[str, Any]


class FakeEngine:
    """An engine client whose only worker says that nothing is live and nothing prepared."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION))
        self.engine_core = self
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.told: dict[str, Any] = {"success": True, "message": "done", "off": None}

    async def call_utility_all_async(self, method: str, name: str, timeout: None, args: Any, kwargs: None) -> Any:
        self.calls.append((args[0], json.loads(args[1])))
        return [[json.dumps(self.told)]]


class Server:
    """vLLM's application: it notes what reaches it, and answers 200."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gauges = SimpleNamespace(set=lambda *args, **options: None)
        monkeypatch.setattr(server, "Gauges", lambda: gauges)
        self.engine = FakeEngine()
        self.state = SimpleNamespace(engine_client=self.engine)
        self.reached: list[tuple[str, bytes]] = []
        self.middleware = server.Middleware(self._app)

    def post(self, path: str, body: object = None, *, query: str = "") -> tuple[int, dict[str, Any]]:
        return asyncio.run(self._ask("POST", path, json.dumps(body or {}).encode(), query))

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return asyncio.run(self._ask("GET", path, b"", ""))

    def start(self) -> list[str]:
        """What the server was told of its start, and what the worker was asked before it."""
        return asyncio.run(self._start())

    @property
    def forgotten(self) -> list[dict[str, Any]]:
        return [argument for call, argument in self.engine.calls if call == "forget"]

    async def _start(self) -> list[str]:
        order: list[str] = []

        async def send(message: Message) -> None:
            order.extend(call for call, _ in self.engine.calls)
            order.append(str(message["type"]))

        await self.middleware({"type": "lifespan", "app": self}, _nothing, send)
        return order

    async def _ask(self, method: str, path: str, body: bytes, query: str) -> tuple[int, dict[str, Any]]:
        sent: list[Message] = []
        halves = [body[: len(body) // 2], body[len(body) // 2 :]]

        async def receive() -> Message:
            return {"type": "http.request", "body": halves.pop(0), "more_body": bool(halves)}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}
        await self.middleware({**scope, "app": self}, receive, send)
        return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent[1:]))

    async def _app(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.reached.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"of": "vLLM"}'})


async def _nothing() -> Message:
    return {"type": "lifespan.startup"}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Server:
    started = Server(monkeypatch)
    assert started.start() == ["start", "lifespan.startup.complete"], "it serves before the ranks have started"
    return started


def test_its_own_routes_are_answered_and_the_others_pass(vllm: Server) -> None:
    assert vllm.get("/weights/version")[0] == 200
    assert vllm.get("/weights/engine")[1]["message"] == "gpusync is on"
    assert vllm.post("/commit_weights", {"target_version": 1})[0] == 400
    assert vllm.reached == []
    for path in ("/metrics", "/v1/models"):
        assert vllm.get(path) == (200, {"of": "vLLM"})
    assert vllm.post("/v1/completions", {"prompt": "x"}) == (200, {"of": "vLLM"})
    assert vllm.reached[-1] == ("/v1/completions", b'{"prompt": "x"}')
    assert vllm.forgotten == []


@pytest.mark.parametrize("path", sorted(server.OTHER_UPDATES - {"/sleep", "/wake_up"}))
def test_what_changes_weights_is_told_to_the_ranks_first(vllm: Server, path: str) -> None:
    assert vllm.post(path, {"x": 1}) == (200, {"of": "vLLM"})
    assert vllm.forgotten == [{"reason": f"{path} was called", "asleep": None}]
    assert vllm.reached == [(path, b'{"x": 1}')]


@pytest.mark.parametrize(
    ("path", "query", "asleep"),
    [
        ("/sleep", "", True),
        ("/sleep", "level=2", True),
        ("/sleep", "level=0", None),
        ("/wake_up", "", False),
        ("/wake_up", "tags=weights&tags=kv_cache", False),
        ("/wake_up", "tags=kv_cache", None),
    ],
)
def test_the_ranks_know_when_their_memory_is_gone(vllm: Server, path: str, query: str, asleep: bool | None) -> None:
    vllm.post(path, query=query)
    assert [each["asleep"] for each in vllm.forgotten] == [asleep]


@pytest.mark.parametrize(
    ("path", "body", "changes"),
    [
        ("/collective_rpc", {"method": "reload_weights"}, True),
        ("/collective_rpc", {"method": "gpusync", "args": ["look", "{}"]}, False),
        ("/collective_rpc", [1], True),
        ("/weight_checker", {"action": "checksum"}, False),
        ("/weight_checker", {"action": "reset"}, True),
    ],
)
def test_some_calls_change_weights_by_what_they_say(vllm: Server, path: str, body: object, changes: bool) -> None:
    vllm.post(path, body)
    assert bool(vllm.forgotten) is changes
    assert vllm.reached == [(path, json.dumps(body).encode())], "the body did not arrive as it was"


def test_a_call_of_which_the_ranks_cannot_be_told_is_not_made(vllm: Server) -> None:
    error = {"type": ["RefusedError"], "message": "a prepare is still running"}
    vllm.engine.told = {"success": False, "message": "x", "error": error, "off": None}
    status, told = vllm.post("/sleep")
    assert (status, "still running" in told["message"]) == (400, True)
    assert vllm.reached == []
