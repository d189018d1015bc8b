"""The HTTP process: gpusync's routes on sglang's own server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gpusync.endpoint import Defaults, HttpReply, HttpRequest, Roots, Routes, Service
from gpusync.endpoint.routes import MAX_BODY_BYTES, json_reply, too_large
from gpusync.engines.gauges import Gauges
from gpusync.engines.settings import Settings, read_settings
from gpusync.engines.sglang.ranks import Ranks

# sglang has metrics of its own there.
NOT_OURS = {("GET", "/metrics")}


def mount(*_: Any, **__: Any) -> None:
    """Before sglang's HTTP server runs: add the routes. Where there is one of that path already, ours comes first, and
    gives way to it while gpusync is off."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def get_off() -> str | None:
        off: str | None = http_server._global_state.scheduler_info.get("gpusync_off")
        return off

    ranks = Ranks(lambda: http_server._global_state.tokenizer_manager, get_off=get_off, gauges=Gauges())
    routes = make_routes(ranks, read_settings())
    table = http_server.app.router.routes
    for method, path in routes.handlers:
        if (method, path) in NOT_OURS:
            continue
        theirs = next((route for route in table if getattr(route, "path", None) == path), None)
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(_endpoint(http_server.Response, routes, ranks, theirs))
        http_server.app.add_route(path, endpoint, methods=[method])
        table.insert(0, table.pop())


def make_routes(ranks: Ranks, settings: Settings) -> Routes:
    async def about(request: HttpRequest) -> HttpReply:
        message = "gpusync is on" if ranks.off is None else f"gpusync is off: {ranks.off}"
        return json_reply(200, {"success": ranks.off is None, "message": message, "groups": list(ranks.told)})

    service = Service(
        ranks,
        roots=Roots(source=settings.source_roots, local=settings.local_roots),
        defaults=Defaults(source_dir=settings.source_dir, local_checkpoint_dir=settings.local_checkpoint_dir),
        timeout_s=settings.timeout_s + settings.visibility_timeout_s,
    )
    return Routes(service, token=settings.token, more={("GET", "/weights/engine"): about})


def _endpoint(response: Any, routes: Routes, ranks: Ranks, theirs: Any) -> Callable[[Any], Awaitable[Any]]:
    async def endpoint(request: Any) -> Any:
        await ranks.refresh()
        if ranks.off is not None and theirs is not None:
            return theirs.handle
        body = await _read_body(request)
        reply = too_large() if body is None else await routes.handle(_as_ours(request, body))
        return response(content=reply.body, status_code=reply.status, media_type=reply.content_type)

    return endpoint


async def _read_body(request: Any) -> bytes | None:
    """None: longer than any request of ours."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return body


def _as_ours(request: Any, body: bytes) -> HttpRequest:
    return HttpRequest(
        method=request.method,
        path=request.url.path,
        query=request.url.query,
        authorization=request.headers.get("authorization"),
        body=body,
    )
