"""What an endpoint counts, and all it knows as Prometheus text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gpusync.endpoint.backend import Status
from gpusync.metrics import report_lines

KINDS = ("pull", "commit", "abort")


class Counters:
    """Requests by kind and result, and the seconds they took. Callers that share an update each count."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {
            (kind, result): 0 for kind in KINDS for result in ("done", "failed")
        }
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.last_report: Mapping[str, object] = {}

    @contextmanager
    def counted(self, kind: str) -> Iterator[None]:
        began, result = time.monotonic(), "failed"
        try:
            yield
            result = "done"
        finally:
            self.requests[kind, result] = self.requests.get((kind, result), 0) + 1
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - began


def metrics_text(counters: Counters, status: Status, *, is_ready: bool, is_busy: bool) -> str:
    """Prometheus text. A version that is not known is left out: 0 is a version."""
    lines = []
    for name, value in (("live", status.live), ("durable", status.durable), ("prepared", status.prepared)):
        lines.append(f"# TYPE gpusync_{name}_version gauge")
        lines += [] if value is None else [f"gpusync_{name}_version {value}"]
    for name, flag in (("ready", is_ready), ("in_doubt", status.in_doubt is not None), ("updating", is_busy)):
        lines += [f"# TYPE gpusync_{name} gauge", f"gpusync_{name} {int(flag)}"]
    lines.append("# TYPE gpusync_requests_total counter")
    for (kind, result), count in counters.requests.items():
        lines.append(f'gpusync_requests_total{{kind="{kind}",result="{result}"}} {count}')
    lines.append("# TYPE gpusync_request_seconds_total counter")
    for kind, seconds in counters.seconds.items():
        lines.append(f'gpusync_request_seconds_total{{kind="{kind}"}} {seconds:.6f}')
    lines += report_lines(counters.last_report)
    return "\n".join(lines) + "\n"
