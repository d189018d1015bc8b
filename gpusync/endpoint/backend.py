"""What an endpoint needs of the ranks behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A target, and the directories it is read from and written to: resolved, and allowed."""

    target_version: int
    source_dir: Path
    local_checkpoint_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where the ranks are. `live` is None when it is unknown; `commit_path` is that of what is prepared; `in_doubt`
    says why nothing may be served now."""

    live: int | None = None
    durable: int | None = None
    prepared: int | None = None
    commit_path: str | None = None
    in_doubt: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "live": self.live,
            "durable": self.durable,
            "prepared": self.prepared,
            "commit_path": self.commit_path,
            "in_doubt": self.in_doubt,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an update led to. `report` is JSON-able: a `SyncReport.as_dict()`, or empty."""

    message: str
    status: Status
    report: Mapping[str, object] = field(default_factory=dict)


class Backend(Protocol):
    """One engine's ranks, all of them, on all its hosts.

    `prepare`, `commit` and `abort` are called one at a time; they raise GpusyncErrors, and every rank is of one mind
    when they return or raise. They end by themselves where that can be had: the service stops waiting for one that does
    not, and starts no other before it has ended.
    """

    async def prepare(self, update: Update) -> Outcome:
        """Verify the target on every rank and make it durable on every host; live weights are not written."""
        ...

    async def commit(self, version: int) -> Outcome:
        """Make `version` live. Already live: nothing to do. Anything but what is prepared: a RefusedError."""
        ...

    async def abort(self, version: int | None) -> Outcome:
        """Drop what is prepared, if it is `version` or that is None."""
        ...

    def status(self) -> Status:
        """At once, also while an update runs."""
        ...

    def metrics(self) -> str:
        """Prometheus text of the ranks' own, at once; may be empty."""
        ...
