"""What a prepare or a commit did, and what waits for its commit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpusync.plan import Applied, Plan
from gpusync.store.rank import PreparedUpdate

CommitPath = Literal["in place", "reload", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One prepare or commit. `seconds` are this rank's, by stage. `bytes_by_class` counts the bytes this rank holds by
    the class of their placement."""

    version: int
    version_before: int | None
    chain: tuple[int, ...]
    commit_path: CommitPath
    reason: str
    decoder: str = "host"
    applier: str = "numpy"
    tensors_changed: int = 0
    compact_bytes: int = 0
    exchanged_bytes: int = 0
    bytes_by_class: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "chain": list(self.chain)}


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A version that is verified on every rank and waits for its commit."""

    version: int
    plan: Plan
    report: SyncReport
    update: PreparedUpdate | None = None
    applied: Applied = field(default_factory=Applied)


class Clock:
    """Seconds by stage on one monotonic clock: each lap is the time since the one before it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = now - self._last
        self._last = now
