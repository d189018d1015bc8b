"""A helper process for what would keep the interpreter of a process that serves.

Jobs go in and answers come out through a pipe, pickled: both ends are ours. The helper is started at the first job,
runs at a lower priority, without torch, and ends when its parent does, whatever ended that.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from gpusync.errors import GpusyncError

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

NICE = 5
WATCH_S = 0.5
FIRST_FD = 3


class HelperEndedError(GpusyncError):
    """A helper died, or was too late: its job may be half done."""


class Job(Protocol[R_co]):
    """What a helper runs: pickled, of a module that it can import without torch."""

    def run(self) -> R_co: ...


class HelperProcess:
    """The helper as its parent sees it. One job at a time. `purpose` is for errors: "decodes"."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._child: _Child | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running helper."""
        return None if self._child is None or self._child.process.poll() is not None else self._child.process.pid

    def run(self, job: Job[R], *, timeout_s: float | None = None) -> R:
        """Raises what the job raised; HelperEndedError where the helper died or was too late, and is gone then."""
        with self._turn:
            if self.pid is None:
                self._drop()
            child = self._child = self._child or _Child.start()
            late = None if timeout_s is None else threading.Timer(timeout_s, child.process.kill)
            if late is not None:
                late.daemon = True
                late.start()
            try:
                answer = child.ask(job)
            except BaseException:
                self._drop()  # or its answer would be taken for that of the next job
                raise
            finally:
                if late is not None:
                    late.cancel()
            if answer is None:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(timeout=1)
                self._drop()
                within = "" if timeout_s is None else f" (within {timeout_s:.0f} s)"
                raise HelperEndedError(
                    f"the helper that {self._purpose} ended before it answered{within}",
                    found=f"exit status {child.process.returncode}",
                )
            result, error = answer
            if error is not None:
                raise error
            found: R = result
            return found

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


@dataclass(frozen=True, slots=True)
class _Child:
    """`pipe` is neither of its standard streams, to which anybody may print."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    @classmethod
    def start(cls) -> _Child:
        mine, its = Pipe()
        with its:
            # lower numbers, free where a parent has closed them, become the child's standard streams
            handed = fcntl.fcntl(its.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _program(handed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(handed,),
            )
        finally:
            os.close(handed)
        return cls(process, mine)

    def ask(self, job: Job[Any]) -> tuple[Any, BaseException | None] | None:
        """`(result, error)` of a job; None where the helper ended."""
        try:
            self.pipe.send(job)
            answer: tuple[Any, BaseException | None] = self.pipe.recv()
        except (OSError, EOFError):
            return None
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def _program(pipe: int) -> str:
    """What the helper runs: it imports what its parent would, from the same places in the same order.

    First it leaves the process group, for what a terminal sends to that is not its affair. Not the session: a kernel
    that schedules sessions against each other has let one wait for minutes beside an engine that spins.
    """
    path = [each for each in sys.path if isinstance(each, str)]
    root = str(Path(__file__).resolve().parents[1])
    if root not in path:
        path.append(root)
    alone, imports = "os.setpgid(0, 0)", f"sys.path[:] = {path!r}; from {__name__} import serve"
    return f"import os, sys; {alone}; {imports}; serve({os.getpid()}, {pipe})"


def serve(parent: int, handed: int) -> None:
    """The helper's life: jobs from the pipe `handed`, until it is closed or the process `parent` is gone. No signal to
    its parent's group ends it before."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICE)
    pipe = Connection(handed)
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, jobs), daemon=True).start()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    while True:
        pipe.send(_answer(jobs.get()))


def _read(pipe: Connection, jobs: SimpleQueue[bytes]) -> None:
    """Ends the process at once when the parent is gone: what is being done then is of no use to anybody."""
    try:
        while True:
            jobs.put(pipe.recv_bytes())
    except (OSError, EOFError):
        os._exit(0)


def _watch(parent: int) -> None:
    """The same where a process that the parent has forked keeps the pipe open."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(0)


def _answer(job: bytes) -> tuple[Any, BaseException | None]:
    try:
        return pickle.loads(job).run(), None
    except Exception as error:  # noqa: BLE001  the parent raises it
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  of others' making: what it says has to do
        return GpusyncError(f"{type(error).__name__}: {error}")
    return error
