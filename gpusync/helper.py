"""A helper process for what would keep the interpreter of a process that serves.

Jobs go in and answers come out through pipes, pickled: both ends are ours. The helper is started at the first job, runs
at a lower priority, without torch, and ends when its parent does, whatever ended that.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from gpusync.errors import GpusyncError

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

NICE = 5
WATCH_S = 0.5


class HelperEndedError(GpusyncError):
    """A helper died, or was too late: its job may be half done."""


class Job(Protocol[R_co]):
    """What a helper runs: pickled, of a module that it can import without torch."""

    def run(self) -> R_co: ...


class HelperProcess:
    """The helper as its parent sees it. One job at a time. `purpose` is for errors: "decodes"."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running helper."""
        return None if self._child is None or self._child.poll() is not None else self._child.pid

    def run(self, job: Job[R], *, timeout_s: float | None = None) -> R:
        """Raises what the job raised; HelperEndedError where the helper died or was too late, and is gone then."""
        with self._turn:
            child = self._start()
            late = None if timeout_s is None else threading.Timer(timeout_s, child.kill)
            if late is not None:
                late.daemon = True
                late.start()
            try:
                answer = _ask(child, job)
            except BaseException:
                self._drop()  # or its answer would be taken for that of the next job
                raise
            finally:
                if late is not None:
                    late.cancel()
            if answer is None:
                self._drop()
                within = "" if timeout_s is None else f" (within {timeout_s:.0f} s)"
                raise HelperEndedError(
                    f"the helper that {self._purpose} ended before it answered{within}",
                    found=f"exit status {child.returncode}",
                )
            result, error = answer
            if error is not None:
                raise error
            found: R = result
            return found

    def close(self) -> None:
        self._drop()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._drop()
            root = Path(__file__).resolve().parents[1]
            path = os.pathsep.join(dict.fromkeys([str(root), *(each for each in sys.path if each)]))
            self._child = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({os.getpid()})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _ask(child: subprocess.Popen[bytes], job: Job[Any]) -> tuple[Any, BaseException | None] | None:
    """`(result, error)` of a job; None where the helper ended."""
    if child.stdin is None or child.stdout is None:
        return None
    try:
        pickle.dump(job, child.stdin)
        child.stdin.flush()
        answer: tuple[Any, BaseException | None] = pickle.load(child.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return answer


def serve(parent: int) -> None:
    """The helper's life: jobs from standard input, until it is closed or the process `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it is the parent's, who may still need answers
    os.nice(NICE)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    jobs: SimpleQueue[Job[Any]] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        pickle.dump(_answer(jobs.get()), answers)
        answers.flush()


def _read(jobs: SimpleQueue[Job[Any]]) -> None:
    """Ends the process at once when the parent is gone: what is being done then is of no use to anybody."""
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001  no job: the parent is told by this process's end
        traceback.print_exc()
        os._exit(1)


def _watch(parent: int) -> None:
    """The same where a process that the parent has forked keeps the pipe open."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(0)


def _answer(job: Job[Any]) -> tuple[Any, BaseException | None]:
    try:
        return job.run(), None
    except Exception as error:  # noqa: BLE001  the parent raises it
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  of others' making: what it says has to do
        return GpusyncError(f"{type(error).__name__}: {error}")
    return error
