"""gpusync's figures among an engine's own: gauges in its Prometheus registry, served by its `/metrics`."""

from __future__ import annotations

import importlib
from typing import Any

from gpusync.endpoint import Status


class Gauges:
    """Of one process. A version that is not known is -1: 0 is a version."""

    def __init__(self) -> None:
        prometheus = importlib.import_module("prometheus_client")
        self._gauges: dict[str, Any] = {
            name: prometheus.Gauge(f"gpusync_{name}", text, multiprocess_mode="mostrecent")
            for name, text in (
                ("live_version", "The version that every rank serves, verified."),
                ("durable_version", "The newest version that can be rebuilt here after a crash."),
                ("prepared_version", "The version that waits for its commit."),
                ("on", "1 unless gpusync is off on this server."),
                ("in_doubt", "1 while a rank does not know what is live."),
            )
        }

    def set(self, status: Status, *, is_on: bool) -> None:
        values = (status.live, status.durable, status.prepared, int(is_on), int(status.in_doubt is not None))
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(-1 if value is None else value)
