"""A group of one process: the same interface, and nobody to wait for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gpusync.errors import GpusyncError
from gpusync.verdict.group import Int64s, Readable, Traffic
from gpusync.verdict.hosts import HostIdentity, Hosts
from gpusync.verdict.verdict import Decision, Failure, Verdict


class AloneGroup:
    """Implements `Group`; there the methods are described."""

    rank = 0
    size = 1
    leader = 0
    is_leader = True
    local_ranks = (0,)
    leaders = (0,)
    problem: str | None = None
    in_doubt: tuple[str, str] | None = None

    def __init__(self, host: HostIdentity) -> None:
        self.hosts = Hosts.of([host])
        self.traffic = Traffic()
        self._begun = 0

    def begin(self, what: str, *, timeout_s: float) -> str:
        self._begun += 1
        return f"1.{self._begun - 1}"

    def agree(self, verdict: Verdict, *, transaction: str, phase: str, timeout_s: float) -> Decision:
        failures = () if verdict.message is None else (self._failure(verdict, verdict.message),)
        return Decision(transaction=transaction, phase=phase, rank=0, failures=failures)

    def resolve(self, transaction: str, phase: str, *, timeout_s: float) -> Decision:
        raise GpusyncError("this rank is not in doubt about that", found=(transaction, phase))

    def rebuild(self, *, timeout_s: float) -> None:
        pass

    def sum_int64(self, array: Int64s, *, timeout_s: float) -> Int64s:
        if array.dtype != np.int64:
            raise GpusyncError("only int64 is summed", found=array.dtype)
        return array.copy()

    def broadcast_bytes(self, data: Readable | None, *, source: int, timeout_s: float) -> bytes:
        return b"" if data is None else bytes(data)

    def gather_bytes(self, data: Readable, *, timeout_s: float) -> list[bytes]:
        return [bytes(data)]

    def gather_objects(self, value: Any, *, timeout_s: float) -> list[Any]:
        # Through JSON, as with more ranks, so that what does not travel is found out here.
        return [json.loads(json.dumps(value))]

    def close(self) -> None:
        pass

    def __enter__(self) -> AloneGroup:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _failure(self, verdict: Verdict, message: str) -> Failure:
        return Failure(
            rank=0,
            host=self.hosts.names[0],
            message=message,
            tensor=verdict.tensor,
            error_type=verdict.error_type,
        )
