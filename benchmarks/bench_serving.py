"""What a prepare costs those who are served: time between tokens while a version is prepared, against the same idle.

For a running engine with gpusync in it (sglang's `/generate`): a few requests at a time are kept in flight, over and
over. In turn, nothing else happens for a while, and then the version is prepared and dropped again. Every gap between
two tokens of a request is one sample, of the prepare if one ran at its end. Nothing is committed, live weights stay as
they are, and a request that fails ends the benchmark without a figure.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Report, emit

REQUEST_TIMEOUT_S = 600.0


@dataclass(slots=True, kw_only=True)
class Load:
    """Requests in flight, `concurrency` at a time until `stopping`. `gaps` are (when, seconds) of every token but the
    first of each request."""

    url: str
    concurrency: int
    tokens: int
    stopping: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Any:
        threads = [threading.Thread(target=self._keep_asking, args=(number,)) for number in range(self.concurrency)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stopping = True
            for thread in threads:
                thread.join()

    def _keep_asking(self, number: int) -> None:
        seed = number
        while not self.stopping:
            seed += self.concurrency
            try:
                self._ask([3 + (seed * 7 + place) % 400 for place in range(8)])
            except (OSError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return

    def _ask(self, prompt: Sequence[int]) -> None:
        sampling = {"max_new_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        last = None
        with _post(self.url, "/generate", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now
        if last is None:
            raise ValueError("a request was answered without a token")


@click.command(help=__doc__)
@click.option("--url", required=True, help="The engine.")
@click.option("--source-dir", required=True)
@click.option("--local-checkpoint-dir", required=True)
@click.option("--version", required=True, type=int, help="The version that is prepared; live has to be behind it.")
@click.option("--concurrency", default=2, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of each request.")
@click.option("--repeats", default=10, show_default=True, help="Prepares, and phases without one.")
@click.option("--idle-s", default=1.0, show_default=True, help="Of each phase without a prepare.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    url: str,
    source_dir: str,
    local_checkpoint_dir: str,
    version: int,
    concurrency: int,
    tokens: int,
    repeats: int,
    idle_s: float,
    as_json: bool,
    as_csv: bool,
) -> None:
    load = Load(url=url, concurrency=concurrency, tokens=tokens)
    target = {"source_dir": source_dir, "local_checkpoint_dir": local_checkpoint_dir, "target_version": version}
    idle: list[tuple[float, float]] = []
    preparing: list[tuple[float, float]] = []
    with load.running():
        time.sleep(idle_s)
        for _ in range(repeats):
            began = time.perf_counter()
            time.sleep(idle_s)
            idle.append((began, time.perf_counter()))
            began = time.perf_counter()
            told = _call(url, "/prepare_weights", target)
            preparing.append((began, time.perf_counter()))
            _call(url, "/abort_weights", {"target_version": version})
    if load.failures:
        raise click.ClickException(f"{len(load.failures)} requests failed: {load.failures[0]}")
    report = Report(
        title=f"time between tokens, {concurrency} requests in flight",
        columns=("while", "seconds", "gaps", "p50 ms", "p99 ms", "max ms"),
        rows=[_row("idle", idle, load.gaps), _row("a prepare", preparing, load.gaps)],
        notes=(f"{told['message']}; no request failed",),
    )
    emit([report], directory=Path(local_checkpoint_dir).parent, as_json=as_json, as_csv=as_csv)


def _row(what: str, spans: Sequence[tuple[float, float]], gaps: Sequence[tuple[float, float]]) -> dict[str, object]:
    seconds = [gap for when, gap in gaps if any(began <= when <= ended for began, ended in spans)]
    p50, p99 = (float(np.percentile(seconds, q)) * 1e3 if seconds else float("nan") for q in (50, 99))
    return {
        "while": what,
        "seconds": sum(ended - began for began, ended in spans),
        "gaps": len(seconds),
        "p50 ms": p50,
        "p99 ms": p99,
        "max ms": max(seconds, default=float("nan")) * 1e3,
    }


def _call(url: str, path: str, body: dict[str, object]) -> dict[str, Any]:
    with _post(url, path, body) as reply:
        told: dict[str, Any] = json.loads(reply.read())
    return told


def _post(url: str, path: str, body: dict[str, object]) -> Any:
    request = urllib.request.Request(
        url.rstrip("/") + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)


if __name__ == "__main__":
    main()
