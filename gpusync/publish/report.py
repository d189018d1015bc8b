"""What a publish did: counts over all ranks, and where the time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One published version. Counts are sums over all ranks, each offered tensor once, and the same on every rank.

    `bytes_offered` and `bytes_changed` are bytes of tensors, `wire_bytes` those of the shards and the index.
    `forms` counts payloads by the form they were written in. `seconds` are this rank's: "total" is wall time, a stage
    is summed over the threads that worked on it.
    """

    version: int
    base_version: int | None
    kind: Literal["delta", "full"]
    encoding: str | None
    checksum: str
    stream_id: str
    path: str
    ranks: int
    tensors_offered: int
    tensors_changed: int
    bytes_offered: int
    bytes_changed: int
    wire_bytes: int
    shards: int
    forms: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """The share of the offered bytes that changed, 0 to 1."""
        return self.bytes_changed / self.bytes_offered if self.bytes_offered else 0.0


class Stopwatch:
    """Adds up seconds by stage, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """By stage, and "total" since this stopwatch was made."""
        with self._lock:
            return {**self._seconds, "total": time.perf_counter() - self._start}
