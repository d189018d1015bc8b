"""What a prepare and a commit did, and what waits for its commit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from gpusync.metrics import report_lines
from gpusync.plan import Applied, Plan
from gpusync.store.update import PreparedUpdate
from gpusync.sync.live import LazyBase

CommitPath = Literal["in place", "reload", "nothing"]
STAGES = ("fetch", "decode", "stage", "digest", "agree", "commit", "fingerprint", "fold")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One prepare, or a prepare and its commit, on this rank.

    `seconds` are by stage (`STAGES`) on one monotonic clock; `fold` is waiting for the local files, which only a reload
    does. Bytes: `wire_bytes` of payloads, read by the leader of this host; `compact_bytes` kept by it for its ranks;
    `touched_bytes` of this rank's params that hold changed tensors; `exchanged_bytes` sent to other ranks for digests;
    `streamed_bytes` too dense to be kept, loaded inside the pause; `peak_staging_bytes` the most that was held beside
    the params. `bytes_by_class` counts what this rank holds by the class of its placement. `repaired`: tensors whose
    live bytes were damaged and were written anew. `verified`: "unverified-source" where nobody publishes checksums and
    the leader's own digests of what it copied were used.
    """

    version: int
    version_before: int | None
    chain: tuple[int, ...]
    commit_path: CommitPath
    reason: str
    decoder: str = "host"
    applier: str = "numpy"
    verified: Literal["checksums", "unverified-source"] = "checksums"
    tensors_changed: int = 0
    repaired: tuple[str, ...] = ()
    wire_bytes: int = 0
    compact_bytes: int = 0
    touched_bytes: int = 0
    exchanged_bytes: int = 0
    streamed_bytes: int = 0
    peak_staging_bytes: int = 0
    bytes_by_class: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = dataclasses.asdict(self)
        return {**told, "chain": list(self.chain), "repaired": list(self.repaired)}

    def prometheus_text(self) -> str:
        """Gauges `gpusync_last_...`: seconds by stage, bytes by class, and whatever else is counted in bytes."""
        return "\n".join(report_lines(self.as_dict())) + "\n"


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A version that is verified on every rank and waits for its commit."""

    version: int
    plan: Plan
    report: SyncReport
    applied: Applied = field(default_factory=Applied)
    update: PreparedUpdate | None = field(default=None, repr=False)
    base: LazyBase | None = field(default=None, repr=False)

    def close(self) -> None:
        """Let go of files."""
        if self.update is not None:
            self.update.close()
        if self.base is not None:
            self.base.close()


class Clock:
    """Seconds by stage on one monotonic clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began)
