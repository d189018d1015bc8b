"""The workers as the agent sees them: started together, called together, ended together.

A worker that died or does not answer ends them all: what the others hold is worth nothing alone, and every one of them
can be killed at any time. They are started anew at the next call that needs them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from gpusync.endpoint import EndpointError, Status, error_from_dict
from gpusync.engines.agent.settings import AgentSettings
from gpusync.engines.agent.worker import run_worker
from gpusync.errors import PeerFailedError
from gpusync.verdict.members import Members

STOP_S = 5.0


class WorkerDiedError(EndpointError):
    """A worker process is gone, or was ended because it did not answer. `rank` is its number."""

    def __init__(self, what: str, *, rank: int, path: str | None = None, found: object = None) -> None:
        self.rank = rank
        super().__init__(what, path=path, found=found)


@dataclass(slots=True, kw_only=True)
class _Worker:
    rank: int
    process: BaseProcess
    channel: Connection


class Workers:
    """One thread at a time. `status` is what the workers said last, and may be read from any."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._workers: list[_Worker] = []
        self.status = Status(in_doubt="not started yet")

    @property
    def are_running(self) -> bool:
        return bool(self._workers)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        size = self._settings.tp
        port = _free_port() if size > 1 else 0
        for rank in range(size):
            members = None if size == 1 else Members(rank=rank, size=size, host="127.0.0.1", port=port)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(self._settings, rank, members, theirs),
                name=f"gpusync-worker-{rank}",
                daemon=False,  # daemons may have no processes of their own; the worker sees to its end itself
            )
            process.start()
            theirs.close()  # the worker's end is its own: when it dies, ours says so
            self._workers.append(_Worker(rank=rank, process=process, channel=ours))

    def call(
        self, what: str, told: Mapping[str, object] | None = None, *, only: int | None = None, path: str | None = None
    ) -> list[Any]:
        """Have all workers do `what`, or only one of them; their results, by rank.

        Raises what the first of them failed with for a reason of its own, or WorkerDiedError; `path` is what they may
        be waiting for.
        """
        asked = [worker for worker in self._workers if only in (None, worker.rank)]
        message = json.dumps({"what": what, **(told or {})}).encode()
        for worker in asked:
            with contextlib.suppress(OSError):  # it is dead, which the wait below says better
                worker.channel.send_bytes(message)
        answers = self._collect(asked, what, path)
        if only is None:
            self._note(answers)
        _raise_failure(answers)
        return [answers[rank]["result"] for rank in sorted(answers)]

    def look(self) -> None:
        """Whether all of them are alive; if one is not, the status says so. From any thread, beside a call."""
        for worker in self._workers:
            code = worker.process.exitcode
            if code is not None and self.status.in_doubt is None:
                why = f"worker {worker.rank} is gone ({_ended(code)})"
                self.status = Status(durable=self.status.durable, in_doubt=why)

    def stop(self) -> None:
        """Let them close what they hold, for a little while."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.send_bytes(json.dumps({"what": "stop"}).encode())
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill("stopped")

    def kill(self, why: str) -> None:
        """End them at once. `why` is what the status says until they are started anew."""
        self.status = Status(durable=self.status.durable, in_doubt=why)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.channel.close()

    def _collect(self, asked: list[_Worker], what: str, path: str | None) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        timeout_s = self._settings.answer_timeout_s
        deadline = time.monotonic() + timeout_s
        waiting = {worker.channel: worker for worker in asked}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                worker = min(waiting.values(), key=lambda each: each.rank)
                self._give_up(worker, f"has not answered {what} within {timeout_s:.3g} s, and was ended", path)
            for channel in ready:
                worker = waiting.pop(channel)  # type: ignore[call-overload]
                try:
                    answers[worker.rank] = json.loads(worker.channel.recv_bytes())
                except (EOFError, OSError):
                    self._give_up(worker, f"died during {what}", path)
        return answers

    def _give_up(self, worker: _Worker, why: str, path: str | None) -> None:
        worker.process.join(1.0)  # its channel is closed a moment before it is gone
        code = worker.process.exitcode
        found = f"process {worker.process.pid}" + ("" if code is None else f", {_ended(code)}")
        error = WorkerDiedError(f"worker {worker.rank} {why}", rank=worker.rank, path=path, found=found)
        self.kill(str(error))
        raise error

    def _note(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        statuses = [answers[rank].get("status") or {"in_doubt": "not loaded"} for rank in sorted(answers)]
        self.status = merge(statuses)


def merge(statuses: list[dict[str, Any]]) -> Status:
    """One engine's status from those of its ranks: live and prepared only where all are of one mind."""
    doubts = [f"worker {rank}: {told['in_doubt']}" for rank, told in enumerate(statuses) if told.get("in_doubt")]
    return Status(
        live=_common(statuses, "live"),
        durable=statuses[0].get("durable"),
        prepared=_common(statuses, "prepared"),
        commit_path=_common(statuses, "commit_path"),
        in_doubt=doubts[0] if doubts else None,
    )


def _raise_failure(answers: Mapping[int, Mapping[str, Any]]) -> None:
    errors = [error_from_dict(answers[rank]["error"]) for rank in sorted(answers) if "error" in answers[rank]]
    own = [error for error in errors if not isinstance(error, PeerFailedError)]
    for error in [*own, *errors]:
        raise error


def _common(statuses: list[dict[str, Any]], name: str) -> Any:
    values = {told.get(name) for told in statuses}
    return values.pop() if len(values) == 1 else None


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
