"""The agent's process: workers behind an endpoint, from its start to SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from gpusync.endpoint import Defaults, Roots, Routes, Service
from gpusync.endpoint.asgi import AsgiApp
from gpusync.endpoint.server import bind, serve_until_stopped
from gpusync.engines.agent.backend import AgentBackend, agent_routes
from gpusync.engines.agent.settings import AgentSettings, Place
from gpusync.engines.agent.workers import Workers
from gpusync.stream import read_checkpoint

STEPS = 3  # of one update, each of which may take the workers' time-out: start, prepare, commit


def serve(
    settings: AgentSettings,
    *,
    host: str,
    port: int,
    roots: Roots,
    place: Place | None,
    token: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is told the address once requests are taken: the weights are loaded by
    then, and attached if there is a `place`."""
    signal.signal(signal.SIGTERM, _stop)
    read_checkpoint(settings.model, follow_links=True)  # what is wrong with it is told before any process is started
    listener = bind(host, port)
    workers = Workers(settings)
    backend = AgentBackend(workers, place=place)
    try:
        backend.start()
        timeout_s = STEPS * settings.answer_timeout_s
        service = Service(backend, roots=roots, defaults=_defaults(place), timeout_s=timeout_s)
        app = AsgiApp(Routes(service, token=token, more=agent_routes(backend, service, roots)))
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"
        serve_until_stopped(app, listener, on_started=lambda: announce(address))
    finally:
        workers.stop()
        listener.close()


def _defaults(place: Place | None) -> Defaults:
    if place is None:
        return Defaults()
    return Defaults(source_dir=str(place.source_dir), local_checkpoint_dir=str(place.local_checkpoint_dir))


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
