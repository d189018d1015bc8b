"""An ASGI application called without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpusync.endpoint.asgi import AsgiApp


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    messages_read: int

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.body)


async def call(
    app: AsgiApp,
    method: str,
    target: str,
    body: bytes | Sequence[bytes] | Mapping[str, object] = b"",
    *,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """`body` as a sequence arrives in pieces; as a mapping it is JSON."""
    path, _, query = target.partition("?")
    raw = json.dumps(body).encode() if isinstance(body, Mapping) else body
    pieces = [raw] if isinstance(raw, bytes) else list(raw)
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    read, sent = 0, []

    async def receive() -> dict[str, object]:
        nonlocal read
        piece = pieces[read]
        read += 1
        return {"type": "http.request", "body": piece, "more_body": read < len(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, end = sent
    return Answer(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, end["body"], read)
