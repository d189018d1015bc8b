"""A helper process that decodes for the leader of a host, so that the engine's process keeps its interpreter to itself.

One line of JSON is a job, one line the answer; the compact file and the updates lie in files. The helper is started at
the first job, runs at a lower priority, without torch, and ends when its parent does, whatever ended that.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import GpusyncError
from gpusync.store.leader import Place, decode_chain
from gpusync.store.tensor_update import write_updates

COMPACT_FILE, UPDATES_FILE = "compact", "updates.json"
NICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Decode `places` into files of `directory`: `COMPACT_FILE` and `UPDATES_FILE`."""

    places: Sequence[Place]
    base_dir: Path
    directory: Path
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    wire_bytes: int
    compact_bytes: int


def run_job(job: DecodeJob) -> DecodeStats:
    """In this process. Raises as `decode_chain`."""
    decoded = decode_chain(job.places, job.base_dir, job.directory / COMPACT_FILE, workers=job.workers)
    write_updates(job.directory / UPDATES_FILE, decoded.updates)
    return DecodeStats(wire_bytes=decoded.wire_bytes, compact_bytes=decoded.compact_bytes)


class DecodeProcess:
    """The helper as its parent sees it. One job at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running helper."""
        return None if self._child is None or self._child.poll() is not None else self._child.pid

    def run(self, job: DecodeJob, *, timeout_s: float) -> DecodeStats:
        """Raises what the job raised; GpusyncError where the helper died or was too late, and is gone then."""
        with self._turn:
            child = self._start()
            late = threading.Timer(timeout_s, child.kill)
            late.daemon = True
            late.start()
            try:
                answer = self._ask(child, _encode_job(job))
            finally:
                late.cancel()
            if answer is None:
                self._drop()
                raise GpusyncError(
                    f"the helper that decodes ended before it answered (within {timeout_s:.0f} s)",
                    path=job.directory,
                    found=f"exit status {child.returncode}",
                )
            return _decode_answer(answer)

    def close(self) -> None:
        self._drop()

    def _start(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._drop()
            root = Path(__file__).resolve().parents[2]
            path = os.pathsep.join(dict.fromkeys([str(root), *(each for each in sys.path if each)]))
            self._child = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._child

    def _ask(self, child: subprocess.Popen[str], line: str) -> str | None:
        if child.stdin is None or child.stdout is None:
            return None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except OSError:
            return None
        return child.stdout.readline() or None

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def serve() -> None:
    """The helper's life: jobs from standard input, until it is closed."""
    os.nice(NICE)
    jobs = _Jobs()
    while (line := jobs.next()) is not None:
        print(_answer(line), flush=True)


class _Jobs:
    """Lines of standard input, read by a thread that ends the process at once when the parent is gone: what is being
    decoded then is of no use to anybody."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._some = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> str | None:
        self._some.acquire()
        return self._lines.pop(0)

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.append(line)
            self._some.release()
        os._exit(0)


def _answer(line: str) -> str:
    try:
        stats = run_job(_decode_job(line))
    except (GpusyncError, OSError, MemoryError, ValueError) as error:
        return json.dumps({"error": b64encode(pickle.dumps(error)).decode()})
    return json.dumps({"wire_bytes": stats.wire_bytes, "compact_bytes": stats.compact_bytes})


def _decode_answer(line: str) -> DecodeStats:
    told = json.loads(line)
    if "error" not in told:
        return DecodeStats(**told)
    # Our own child wrote it, from errors that it raised itself.
    error: BaseException = pickle.loads(b64decode(told["error"]))
    raise error


def _encode_job(job: DecodeJob) -> str:
    places = [[os.fspath(place.directory), place.version] for place in job.places]
    return json.dumps([places, os.fspath(job.base_dir), os.fspath(job.directory), job.workers])


def _decode_job(line: str) -> DecodeJob:
    places, base_dir, directory, workers = json.loads(line)
    return DecodeJob(
        places=tuple(Place(directory=Path(at), version=version) for at, version in places),
        base_dir=Path(base_dir),
        directory=Path(directory),
        workers=workers,
    )
