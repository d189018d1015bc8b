"""The API server: gpusync's routes, before vLLM's own.

Requests for other routes pass, but those that change weights behind gpusync's back, or take their memory away: the
ranks are told of these first.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from gpusync.endpoint import Defaults, HttpReply, HttpRequest, Roots, Routes, Service
from gpusync.endpoint.asgi import AsgiApp, send_reply
from gpusync.endpoint.routes import failure_reply, json_reply
from gpusync.engines.gauges import Gauges
from gpusync.engines.vllm.ranks import Ranks
from gpusync.engines.vllm.settings import Settings, read_settings
from gpusync.errors import GpusyncError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# vLLM has metrics of its own there.
NOT_OURS = {("GET", "/metrics")}
OTHER_UPDATES = frozenset(
    (
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/sleep",
        "/wake_up",
    )
)
# Updates only by what they are asked for: a method that is none of ours, an action that is not a look.
BY_BODY = {"/collective_rpc": ("method", ("gpusync",)), "/weight_checker": ("action", ("checksum", "compare"))}


class Middleware:
    """`--middleware gpusync.engines.vllm.Middleware`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._server: Any = None
        settings = read_settings()
        self._ranks = Ranks(lambda: self._server.state.engine_client, settings=settings, gauges=Gauges())
        self._service = make_service(self._ranks, settings)
        self._routes = make_routes(self._ranks, self._service, token=settings.token)
        self._ours = AsgiApp(self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._server = scope.get("app", self._server)
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._starting(send))
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (scope["method"], path) in self._routes.handlers.keys() - NOT_OURS:
            await self._ranks.start()
            await self._ranks.refresh()
            await self._ours({**scope, "path": path}, receive, send)
            return
        try:
            receive = await self._make_way(path, scope, receive)
        except GpusyncError as error:
            await send_reply(send, failure_reply(400, f"{path} was not called: {error}"))
        else:
            await self._app(scope, receive, send)

    def _starting(self, send: Send) -> Send:
        """Before the server says that it has started, the ranks have."""

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._ranks.start()
            await send(message)

        return sending

    async def _make_way(self, path: str, scope: Scope, receive: Receive) -> Receive:
        """Tell the ranks, if this request changes weights. Returns where its body can be read from."""
        is_update = path in OTHER_UPDATES and scope["method"] == "POST"
        if path in BY_BODY and scope["method"] == "POST":
            body = await _read_body(receive)
            receive = _replaying(body, receive)
            is_update = not _is_look(body, *BY_BODY[path])
        if is_update and self._ranks.off is None:
            asleep = _falls_asleep(path, scope["query_string"])
            await self._service.exclusively(path, lambda: self._ranks.forget(f"{path} was called", asleep=asleep))
        return receive


def make_service(ranks: Ranks, settings: Settings) -> Service:
    return Service(
        ranks,
        roots=Roots(source=settings.source_roots, local=settings.local_roots),
        defaults=Defaults(source_dir=settings.source_dir, local_checkpoint_dir=settings.local_checkpoint_dir),
        timeout_s=settings.timeout_s + settings.visibility_timeout_s,
    )


def make_routes(ranks: Ranks, service: Service, *, token: str | None) -> Routes:
    async def about(request: HttpRequest) -> HttpReply:
        message = "gpusync is on" if ranks.off is None else f"gpusync is off: {ranks.off}"
        groups = [engine[0] for engine in ranks.told]
        told = {"success": ranks.off is None, "message": message, "groups": groups, "ranks": ranks.told}
        return json_reply(200, told)

    return Routes(service, token=token, more={("GET", "/weights/engine"): about})


def _falls_asleep(path: str, query: bytes) -> bool | None:
    """Whether the weights' memory is gone after this call; None: as before."""
    asked = parse_qs(query.decode("latin-1"))
    if path == "/sleep":
        return None if asked.get("level") == ["0"] else True
    if path == "/wake_up":
        tags = asked.get("tags")
        return False if tags is None or "weights" in tags else None
    return None


def _is_look(body: bytes, name: str, looks: tuple[str, ...]) -> bool:
    try:
        return json.loads(body).get(name) in looks
    except (ValueError, AttributeError):
        return False


async def _read_body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return body


def _replaying(body: bytes, receive: Receive) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return replay
