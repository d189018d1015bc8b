"""The HTTP process: gpusync's routes on sglang's server, and the ranks behind them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gpusync.endpoint import (
    Defaults,
    HttpReply,
    HttpRequest,
    Outcome,
    Roots,
    Routes,
    Service,
    Status,
    Update,
    error_from_dict,
)
from gpusync.endpoint.routes import MAX_BODY_BYTES, json_reply, too_large
from gpusync.engines.sglang import messages
from gpusync.engines.sglang.settings import Settings, read_settings
from gpusync.errors import RefusedError

LOG = logging.getLogger(__name__)

Told = Mapping[str, Any]
# sglang's metrics are where they always are.
NOT_OURS = {("GET", "/metrics")}


class Ranks:
    """The ranks of all groups of this server, as the endpoint's `Backend`. Of several groups (data parallel), the first
    that failed is told of; the versions are those that all of them have."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        self._told: Sequence[Told] = ()

    async def prepare(self, update: Update) -> Outcome:
        return await self._update(
            "prepare",
            version=update.target_version,
            source_dir=str(update.source_dir),
            local_checkpoint_dir=str(update.local_checkpoint_dir),
        )

    async def commit(self, version: int) -> Outcome:
        """By sglang's own reload, which every rank turns into the commit."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        status = await self.refresh()
        if status.prepared != version:
            if status.live == version:
                return Outcome(message=f"version {version} is live already", status=status)
            raise RefusedError("not what is prepared", version=version, found=status.prepared)
        request = UpdateWeightFromDiskReqInput(
            model_path=str(self._told[0]["local_checkpoint_dir"]), weight_version=str(version)
        )
        success, message, _ = await self._manager.update_weights_from_disk(request, None)
        status = await self.refresh()
        if not success:
            raise RefusedError(message, version=version, found=f"live version {status.live}")
        return Outcome(message=message, status=status)

    async def abort(self, version: int | None) -> Outcome:
        return await self._update("abort", version=version)

    def status(self) -> Status:
        versions = {name: _common([told.get(name) for told in self._told]) for name in ("live", "durable", "prepared")}
        return Status(**versions, commit_path=_common([told.get("commit_path") for told in self._told]))

    def metrics(self) -> str:
        return ""

    async def refresh(self) -> Status:
        """Ask the ranks where they are."""
        self._manager.auto_create_handle_loop()
        answers = await self._manager.gpusync_look_communicator(messages.build("GpusyncLookReqInput"))
        self._told = [messages.parse_told(answer) for answer in answers]
        return self.status()

    @property
    def facts(self) -> Told:
        return {"groups": list(self._told)}

    @property
    def off(self) -> str | None:
        return next((str(told["off"]) for told in self._told if told.get("off") is not None), None)

    async def _update(self, action: str, **argument: object) -> Outcome:
        self._manager.auto_create_handle_loop()
        request = messages.build("GpusyncUpdateReqInput", action=action, argument=argument)
        answers = await self._manager.gpusync_update_communicator(request)
        self._told = told = [messages.parse_told(answer) for answer in answers]
        failed = next((each for each in told if not each["success"]), None)
        if failed is not None:
            raise error_from_dict(failed["error"])
        return Outcome(message=str(told[0]["message"]), status=self.status())


def mount(*arguments: Any, **options: Any) -> None:
    """Before sglang's HTTP server runs: add the routes. Where sglang has one of them already, ours goes first and gives
    way to it while gpusync is off."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    settings = read_settings()
    ranks = Ranks(None)
    routes = _routes(ranks, settings)
    for method, path in routes.handlers:
        if (method, path) in NOT_OURS:
            continue
        theirs = next((each for each in http_server.app.router.routes if getattr(each, "path", None) == path), None)
        endpoint = _endpoint(http_server, routes, ranks, theirs)
        http_server.app.add_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=[method])
        http_server.app.router.routes.insert(0, http_server.app.router.routes.pop())


def _routes(ranks: Ranks, settings: Settings) -> Routes:
    async def about(request: HttpRequest) -> HttpReply:
        return json_reply(200, {"success": True, "message": ranks.off or "gpusync is on", **ranks.facts})

    service = Service(
        ranks,
        roots=Roots(source=settings.source_roots, local=settings.local_roots),
        defaults=Defaults(source_dir=settings.source_dir, local_checkpoint_dir=settings.local_checkpoint_dir),
        timeout_s=settings.timeout_s + settings.visibility_timeout_s,
    )
    return Routes(service, token=settings.token, more={("GET", "/weights/engine"): about})


def _endpoint(http_server: Any, routes: Routes, ranks: Ranks, theirs: Any) -> Callable[[Any], Awaitable[Any]]:
    async def endpoint(request: Any) -> Any:
        ranks._manager = http_server._global_state.tokenizer_manager
        await ranks.refresh()
        if ranks.off is not None and theirs is not None:
            return theirs.handle
        body = await _read_body(request)
        reply = too_large() if body is None else await routes.handle(_as_ours(request, body))
        return http_server.Response(content=reply.body, status_code=reply.status, media_type=reply.content_type)

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


def _common(values: Sequence[Any]) -> Any:
    """The one value that all groups have, else None."""
    return values[0] if values and all(value == values[0] for value in values) else None
