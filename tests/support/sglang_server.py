"""A real sglang server on this machine's CPU, in a process group of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 240
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--skip-tokenizer-init"),
    *("--max-total-tokens", "2048", "--context-length", "256", "--mem-fraction-static", "0.3", "--dtype", "bfloat16"),
    *("--host", "127.0.0.1", "--log-level", "info"),
)
Reply = tuple[int, dict[str, Any]]


class SglangServer:
    """`site` is a directory with gpusync installed; None: a server without it."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        log: Path,
        site: Path | None,
        tp: int = 1,
        env: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        stub = Path(__file__).resolve().parents[1] / "engines" / "stub"
        paths = [stub] if site is None else [site, stub]
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")},
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}),
            **(env or {}),
        }
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--tp", str(tp)]
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *FLAGS, *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )

    def __enter__(self) -> SglangServer:
        try:
            self.wait_until_up()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait_until_up(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                if self.get("/model_info", timeout_s=5)[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL for the server and all its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, *, timeout_s: float = 60) -> Reply:
        return self._ask(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 120) -> Reply:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        return self._ask(request, timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, _as_object(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _as_object(error.read())

    def tokens(self, count: int = 16) -> list[int]:
        """What the model says, greedily."""
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": _greedy(count)}
        status, reply = self.post("/generate", body)
        assert status == 200, reply
        return [int(token) for token in reply["output_ids"]]

    @contextmanager
    def generating(self, count: int) -> Iterator[Callable[[], int]]:
        """While a request runs that has said its first token; gives a function that reads how many more it says."""
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": _greedy(count), "stream": True}
        request = urllib.request.Request(
            self.url + "/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert any(line.startswith(b"data: {") for line in reply)
            yield lambda: sum(line.startswith(b"data: {") for line in reply)

    def weight_version(self) -> str:
        status, reply = self.post("/generate", {"input_ids": [5, 6], "sampling_params": _greedy(1)})
        assert status == 200, reply
        return str(reply["meta_info"]["weight_version"])

    def checksums(self) -> list[str]:
        """The engine's own digest of its live weights, by rank."""
        status, reply = self.post("/weights_checker", {"action": "checksum"})
        assert status == 200, reply
        return [str(rank["per_gpu_checksum"]) for rank in reply["ranks"]]


def _greedy(count: int) -> dict[str, object]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}


def _as_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {"text": body.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"value": value}
