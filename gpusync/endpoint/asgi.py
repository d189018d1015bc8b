"""The routes as an ASGI application: any ASGI server runs it alone, and any ASGI framework takes it as an endpoint.

In a Starlette or FastAPI application: `app.router.routes.insert(0, Route(path, endpoint=AsgiApp(routes)))`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gpusync.endpoint.routes import MAX_BODY_BYTES, HttpReply, HttpRequest, Routes, too_large

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class AsgiApp:
    """Takes HTTP requests, and the server's start and end."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await send_reply(send, await self._reply(scope, receive))

    async def _reply(self, scope: Scope, receive: Receive) -> HttpReply:
        body = await _read_body(receive)
        if body is None:
            return too_large()
        return await self._routes.handle(
            HttpRequest(
                method=scope["method"],
                path=scope["path"],
                query=scope["query_string"].decode("latin-1"),
                authorization=_header(scope, b"authorization"),
                body=body,
            )
        )


async def _read_body(receive: Receive) -> bytes | None:
    """None as soon as it is too long, or the caller has gone: nothing more is read then."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return body


def _header(scope: Scope, name: bytes) -> str | None:
    values = [value for key, value in scope["headers"] if key.lower() == name]
    return values[0].decode("latin-1") if values else None


async def send_reply(send: Send, reply: HttpReply) -> None:
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
