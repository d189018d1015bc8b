"""The HTTP routes, as a function from request to reply. Whatever server there is calls `Routes.handle`.

`POST /pull_weights /prepare_weights /commit_weights /abort_weights`, `GET /weights/version /weights/ready /metrics`.
Every reply but the metrics is a JSON object with `success` and `message`.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

from gpusync.endpoint.backend import Outcome
from gpusync.endpoint.counters import metrics_text
from gpusync.endpoint.errors import RequestError, UnauthorizedError
from gpusync.endpoint.messages import parse_abort, parse_commit, parse_pull
from gpusync.endpoint.service import Service
from gpusync.endpoint.wire import error_as_dict
from gpusync.errors import GpusyncError
from gpusync.stream.limits import MAX_VERSION

LOG = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
JSON = "application/json"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """`query` is what follows the question mark; `authorization` that header, or None."""

    method: str
    path: str
    query: str = ""
    authorization: str | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status: int
    body: bytes
    content_type: str = JSON


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


class Routes:
    """The routes of a service. With a `token`, every one of them wants `Authorization: Bearer <token>`.

    `more` adds routes of an engine, by method and path; a GpusyncError that they raise is answered like ours.
    """

    def __init__(
        self, service: Service, *, token: str | None = None, more: Mapping[tuple[str, str], Handler] | None = None
    ) -> None:
        self._service, self._token = service, token
        self.handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/pull_weights"): self._pull,
            ("POST", "/prepare_weights"): self._prepare,
            ("POST", "/commit_weights"): self._commit,
            ("POST", "/abort_weights"): self._abort,
            ("GET", "/weights/version"): self._version,
            ("GET", "/weights/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            **(more or {}),
        }

    async def handle(self, request: HttpRequest) -> HttpReply:
        """Never raises, but for the cancellation of the caller."""
        try:
            self._authorize(request)
            handler = self.handlers.get((request.method, request.path))
            if handler is None:
                return self._no_route(request)
            if len(request.body) > MAX_BODY_BYTES:
                return too_large()
            return await handler(request)
        except UnauthorizedError as error:
            return json_reply(401, _failure(error))
        except GpusyncError as error:
            return json_reply(400, _failure(error))
        # The caller is owed an answer whatever happened, and the next caller a server.
        except Exception as error:
            LOG.exception("%s %s failed", request.method, request.path)
            return json_reply(500, _failure(error))

    def _authorize(self, request: HttpRequest) -> None:
        if self._token is None:
            return
        kind, _, given = (request.authorization or "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise UnauthorizedError("the request has no token, or another one than this endpoint's")

    def _no_route(self, request: HttpRequest) -> HttpReply:
        methods = [method for method, path in self.handlers if path == request.path]
        if methods:
            return failure_reply(405, f"{request.path} takes {' or '.join(methods)}")
        return failure_reply(404, "no such route")

    async def _pull(self, request: HttpRequest) -> HttpReply:
        return outcome_reply(await self._service.pull(parse_pull(request.body)))

    async def _prepare(self, request: HttpRequest) -> HttpReply:
        return outcome_reply(await self._service.pull(replace(parse_pull(request.body), commit=False)))

    async def _commit(self, request: HttpRequest) -> HttpReply:
        return outcome_reply(await self._service.commit(parse_commit(request.body)))

    async def _abort(self, request: HttpRequest) -> HttpReply:
        return outcome_reply(await self._service.abort(parse_abort(request.body)))

    async def _version(self, request: HttpRequest) -> HttpReply:
        return json_reply(200, self._told("live, durable and prepared version"))

    async def _ready(self, request: HttpRequest) -> HttpReply:
        version = _queried_version(request.query)
        if self._service.is_ready(version):
            return json_reply(200, self._told("ready"))
        what = "not ready" if version is None else f"not ready for version {version}"
        return json_reply(503, self._told(what) | {"success": False})

    async def _metrics(self, request: HttpRequest) -> HttpReply:
        service = self._service
        text = metrics_text(
            service.counters,
            service.status(),
            is_ready=service.is_ready(),
            is_busy=service.running is not None,
        )
        return HttpReply(status=200, body=(text + service.backend.metrics()).encode(), content_type=TEXT)

    def _told(self, message: str) -> dict[str, object]:
        service = self._service
        told = {"success": True, "message": message, **service.status().as_dict()}
        return told | {"ready": service.is_ready(), "running": service.running}


def json_reply(status: int, told: Mapping[str, object]) -> HttpReply:
    return HttpReply(status=status, body=json.dumps(told).encode())


def outcome_reply(outcome: Outcome) -> HttpReply:
    told = {"success": True, "message": outcome.message, **outcome.status.as_dict()}
    return json_reply(200, told | {"report": dict(outcome.report)})


def failure_reply(status: int, message: str) -> HttpReply:
    """For what is wrong before there is an error to tell of."""
    return json_reply(status, _failure(RequestError(message)))


def too_large() -> HttpReply:
    return failure_reply(413, f"the request is longer than {MAX_BODY_BYTES} bytes")


def _failure(error: Exception) -> dict[str, object]:
    facts = error_as_dict(error)
    return {"success": False, "message": facts["message"], "error": facts}


def _queried_version(query: str) -> int | None:
    try:
        values = parse_qs(query, keep_blank_values=True, max_num_fields=16).get("version", [])
    except ValueError as error:
        raise RequestError("the query cannot be read", found=error) from error
    if not values:
        return None
    if len(values) > 1 or not values[0].isascii() or not values[0].isdigit() or len(values[0]) > 13:
        raise RequestError("version is not a version number", expected=f"0..{MAX_VERSION}", found=values[0][:80])
    return int(values[0])
