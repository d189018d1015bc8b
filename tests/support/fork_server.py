"""New processes in milliseconds: a server that has everything imported, holds no threads, and forks for each call.

Tests that kill processes need hundreds of them. Forking the test runner itself would copy whatever threads and locks
other tests have left in it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), and what its action returned or raised."""

    code: int
    value: Any = None
    error: BaseException | None = None

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


class ForkServer:
    """Runs picklable actions, each in a process of its own. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support import fork_server; fork_server.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, action: Callable[[], Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ended:
        return self.wait(self.start(action), timeout_s=timeout_s)

    def start(self, action: Callable[[], Any]) -> int:
        """Start `action()` in a new process and return its id."""
        return self._ask(("start", action), timeout_s=DEFAULT_TIMEOUT_S)

    def wait(self, pid: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ended:
        """How the process ended. One that hangs is killed and fails the test."""
        try:
            return self._ask(("wait", pid), timeout_s=timeout_s)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._answer(DEFAULT_TIMEOUT_S)
            raise AssertionError(f"a process hung for {timeout_s} s") from None

    def close(self) -> None:
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.wait(timeout=DEFAULT_TIMEOUT_S)
            self._process.stdout.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: tuple[str, Any], *, timeout_s: float) -> Any:
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError
        return pickle.load(self._process.stdout)


def serve() -> None:
    """The server's own life: answer requests on standard input until it is closed."""
    import gpusync.disk
    import gpusync.publish  # noqa: F401
    from gpusync.mirror import workers

    workers.SMALL_BYTES = 1  # two workers are two, for the small tensors of tests too
    results: dict[int, int] = {}
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an action prints must not end up among the answers
    while True:
        try:
            kind, what = pickle.load(requests)
        except EOFError:
            return
        answer = _start(what, results) if kind == "start" else _wait(what, results)
        pickle.dump(answer, answers)
        answers.flush()


def _start(action: Callable[[], Any], results: dict[int, int]) -> int:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _run(action, write_fd)
    os.close(write_fd)
    results[pid] = read_fd
    return pid


def _run(action: Callable[[], Any], write_fd: int) -> None:
    code = 1
    try:
        try:
            told = pickle.dumps(("value", action()))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            told = _pickled_error(error)
        with os.fdopen(write_fd, "wb") as out:
            out.write(told)
        code = 0
    finally:
        os._exit(code)


def _pickled_error(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        told = pickle.dumps(("error", error))
        pickle.loads(told)
        return told
    except Exception:  # noqa: BLE001 - some exceptions cannot be pickled
        return pickle.dumps(("error", RuntimeError(text)))


def _wait(pid: int, results: dict[int, int]) -> Ended:
    with os.fdopen(results.pop(pid), "rb") as told:
        raw = told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not raw:
        return Ended(code)
    kind, what = pickle.loads(raw)
    return Ended(code, value=what) if kind == "value" else Ended(code, error=what)
