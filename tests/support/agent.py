"""`gpusync serve` as a process of its own, and what its digests have to be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import xxhash

from gpusync.endpoint.client import Client
from support.checkpoints import State

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60


class Agent:
    """A running agent. `errors` is the file its stderr goes to."""

    def __init__(self, root: Path, *options: str, tp: int = 2, environment: Mapping[str, str] | None = None) -> None:
        self.errors = root / "agent-errors.txt"
        command = [sys.executable, "-m", "gpusync", "serve", "--model", str(root / "base"), "--tp", str(tp)]
        paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--device", "cpu", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " at http://" in line, self.errors.read_text()
        self.url = line.split()[-1]
        self.client = Client(self.url, timeout=WAIT_S, retry_for=0)

    @property
    def workers(self) -> list[psutil.Process]:
        """Its workers, in the order of their ranks."""
        children = psutil.Process(self.process.pid).children()
        spawned = [child for child in children if any("spawn_main" in part for part in child.cmdline())]
        return sorted(spawned, key=lambda child: child.pid)

    def digests(self) -> list[dict[str, Any]]:
        told = self.client.get("/weights/digests")
        return [{name: part["digest"] for name, part in rank.items()} for rank in told["ranks"]]

    def reload(self, local: Path, version: int) -> dict[str, Any]:
        """What slime's trainer does once every engine has pulled."""
        for quiet in ("/pause_generation", "/flush_cache"):
            self.client.post(quiet, {})
        told = self.client.post("/update_weights_from_disk", {"model_path": str(local), "weight_version": str(version)})
        self.client.post("/continue_generation", {})
        return told

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def agent(root: Path, *options: str, **more: Any) -> Iterator[Agent]:
    running = Agent(root, *options, **more)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end()


def expected_digests(state: State, size: int) -> list[dict[str, str]]:
    """By the documented rule: 2-D tensors in equal parts of their rows where that goes, everything else whole."""
    ranks: list[dict[str, str]] = []
    for rank in range(size):
        ranks.append({})
        for name, tensor in state.items():
            data = tensor.data.tobytes()
            if len(tensor.shape) == 2 and tensor.shape[0] % size == 0:
                part = len(data) // size
                data = data[rank * part : (rank + 1) * part]
            ranks[-1][name] = xxhash.xxh3_128_hexdigest(data)
    return ranks
