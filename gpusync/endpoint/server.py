"""A server of its own for the routes, on uvicorn. The only module that knows a web server."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gpusync.endpoint.asgi import AsgiApp
from gpusync.endpoint.errors import EndpointError
from gpusync.errors import BackendUnavailableError

BACKLOG = 256
SHUTDOWN_S = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EndpointError("cannot listen", path=f"{host}:{port}", found=error) from error
    return listener


def serve_until_stopped(app: AsgiApp, listener: socket.socket, *, on_started: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, which requests that run get a few seconds to end after."""
    try:
        import uvicorn
    except ImportError as error:
        raise BackendUnavailableError("a server needs uvicorn", expected="the extra `server`", found=error) from error
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S
    )
    on_started()
    uvicorn.Server(config).run(sockets=[listener])
