"""Endpoints behind real sockets, in threads of this process: ours with fake ranks, and servers that misbehave."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from gpusync.endpoint import Defaults, Roots, Routes, Service
from gpusync.endpoint.asgi import AsgiApp
from gpusync.endpoint.server import bind
from support.backends import FakeBackend


@contextlib.contextmanager
def served(root: Path, backend: FakeBackend, *, token: str | None = None) -> Iterator[str]:
    """The address of an endpoint whose ranks are `backend`."""
    defaults = Defaults(source_dir=str(root / "stream"), local_checkpoint_dir=str(root / "local"))
    routes = Routes(Service(backend, roots=Roots(source=(root,), local=(root,)), defaults=defaults), token=token)
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(AsgiApp(routes), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


Answering = Callable[[http.server.BaseHTTPRequestHandler, int], None]


@contextlib.contextmanager
def answering(answer: Answering) -> Iterator[str]:
    """The address of a server that calls `answer(handler, n)` for the n-th request, from 0."""
    counted = iter(range(10**6))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self, next(counted))

        do_POST = do_GET

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


def reply(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
