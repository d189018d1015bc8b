"""A real vLLM server on this machine's CPU, in a process group of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 300
FLAGS = (
    *("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "bfloat16"),
    *("--skip-tokenizer-init", "--host", "127.0.0.1", "--disable-log-stats"),
)
OURS = (
    *("--worker-extension-cls", "gpusync.engines.vllm.WorkerExtension"),
    *("--middleware", "gpusync.engines.vllm.Middleware"),
)
Reply = tuple[int, dict[str, Any]]


class VllmServer:
    """`site` is a directory with gpusync installed; None: a server without it. `plain`: linear weights are kept as they
    were loaded, on a server without gpusync too."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        log: Path,
        site: Path,
        ours: bool = True,
        plain: bool = True,
        tp: int = 1,
        env: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")},
            "PYTHONPATH": str(site),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            **({"GPUSYNC_VLLM_PLAIN_LINEARS": "1"} if plain else {}),
            **({"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}),
            **(env or {}),
        }
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "-tp", str(tp)]
        self.model, self.log = model, log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *FLAGS, *(OURS if ours else ()), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )

    def __enter__(self) -> VllmServer:
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
                if self.get("/health", timeout_s=5)[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL for the server and all its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def get(self, path: str, *, timeout_s: float = 60) -> Reply:
        return self._ask(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"), timeout_s)

    def post(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 120) -> Reply:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        return self._ask(request, timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, _as_object(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _as_object(error.read())

    def tokens(self, count: int = 16) -> list[int]:
        """What the model says, greedily."""
        body = {"model": str(self.model), "prompt": [5, 6, 7, 8], "max_tokens": count, "temperature": 0}
        status, reply = self.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        assert status == 200, reply
        return [int(token) for token in reply["choices"][0]["token_ids"]]

    def weight_version(self) -> str:
        status, reply = self.get("/weight_info")
        assert status == 200, reply
        return str(reply["weight_version"])

    def checksums(self) -> dict[str, str]:
        """The engine's own digest of every live parameter of every rank."""
        status, reply = self.post("/weight_checker", {"action": "checksum"})
        assert status == 200, reply
        return dict(reply["checksums"])

    def reload(self, directory: Path) -> None:
        """By vLLM's own reload, without gpusync."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        for path, asked in (("/collective_rpc", body), ("/reset_prefix_cache", None)):
            status, reply = self.post(path, asked)
            assert status == 200, reply


def _as_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {"text": body.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"value": value}
