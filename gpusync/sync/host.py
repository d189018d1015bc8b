"""The leader's part for the ranks of one host: fetch a version once, decode it once, keep it durable.

What it tells its ranks is a small record; steps and words lie in files on this host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusync.disk import pull
from gpusync.errors import MirrorError
from gpusync.hooks import Hook
from gpusync.layout import LayoutMap
from gpusync.mirror.look import Sources, plan_ahead
from gpusync.mirror.mirror import Mirror
from gpusync.mirror.receive import read_receipt
from gpusync.plan import Applied, Plan
from gpusync.store.decoding import (
    COMPACT_FILE,
    UPDATES_FILE,
    DecodeJob,
    DecodeProcess,
    DecodeStats,
    run_job,
)
from gpusync.store.leader import Place, followed_by, full_updates
from gpusync.store.tensor_update import read_updates, write_updates
from gpusync.stream import VersionIndex, read_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a leader tells its ranks of a version that is on this host. `files`: where the compact file and the updates
    lie, None where there are none. `is_unverified`: nobody has published checksums of it; the leader's are used."""

    plan: Plan
    stream_id: str | None
    digests: Mapping[int, str]
    files: str | None = None
    is_unverified: bool = False
    stats: DecodeStats = field(default_factory=lambda: DecodeStats(wire_bytes=0, compact_bytes=0))
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> object:
        """What has to be the same on all hosts."""
        return [self.plan, self.stream_id, dict(self.digests), self.files is None, self.is_unverified]

    def as_told(self) -> dict[str, Any]:
        return {
            "plan": [getattr(self.plan, name) for name in Plan.__slots__],
            "stream_id": self.stream_id,
            "digests": list(self.digests.items()),
            "files": self.files,
            "is_unverified": self.is_unverified,
            "stats": [self.stats.wire_bytes, self.stats.compact_bytes],
            "seconds": dict(self.seconds),
        }

    @classmethod
    def from_told(cls, told: Mapping[str, Any]) -> Fetched:
        plan = dict(zip(Plan.__slots__, told["plan"], strict=True))
        return cls(
            plan=Plan(**{**plan, "chain": tuple(plan["chain"])}),
            stream_id=told["stream_id"],
            digests=dict(told["digests"]),
            files=told["files"],
            is_unverified=told["is_unverified"],
            stats=DecodeStats(wire_bytes=told["stats"][0], compact_bytes=told["stats"][1]),
            seconds=told["seconds"],
        )

    def applied_after(self, before: Applied) -> Applied:
        """What a store that was at `before` holds once this is live."""
        digests = {**({} if self.plan.reseeds else before.digests), **self.digests}
        return Applied(version=self.plan.target, stream_id=self.stream_id, digests=digests)


class Host:
    """The mirror of this host and the helper that decodes, on the rank that leads it."""

    def __init__(
        self,
        local_checkpoint_dir: Path,
        sources: Sources,
        *,
        pre_read_hook: Hook | str | None,
        timeout_s: float,
        visibility_timeout_s: float,
        workers: int,
        in_process: bool,
    ) -> None:
        self._local, self._sources = local_checkpoint_dir, sources
        self._timeout_s, self._visibility_timeout_s, self._workers = timeout_s, visibility_timeout_s, workers
        self.mirror = Mirror(
            local_checkpoint_dir,
            base_dir=sources.base_dir,
            source_dir=sources.source_dir,
            pre_read_hook=pre_read_hook,
            lock_timeout=timeout_s,
            workers=workers,
        )
        self._decoder = None if in_process else DecodeProcess()
        self._held: list[int] = []
        self._scratch: list[Path] = []

    def hold(self, version: int) -> None:
        """Keep `version` and later ones out of the files until `let_go`."""
        self.mirror.hold(version)
        self._held.append(version)

    def let_go(self) -> None:
        """End all holds, and remove what was decoded."""
        while self._held:
            self.mirror.release(self._held.pop())
        while self._scratch:
            self.mirror.drop_scratch(self._scratch.pop())

    def fetch(self, target: int, live: Applied, layout: LayoutMap) -> Fetched:
        """Bring `target` to this host and decode what leads there from `live`. It is a candidate then, or is durable
        already; `accept` or `drop` it. Raises as `Mirror.receive` and decoders do, LayoutError for a full version
        whose tensors are not the model's."""
        began = time.monotonic()
        # Ranks may roll back to what is live: the files must not go past it.
        self.hold(target if live.version is None else min(target, live.version + 1))
        durable = self.mirror.status().durable_version
        if durable is None or durable < target or live.version is None or live.version > target:
            self.mirror.receive(target, visibility_timeout=self._visibility_timeout_s)
        plan, indexes = plan_ahead(self._sources, live, target=target)
        fetched = time.monotonic()
        newest = indexes.get(target)
        stats, files, unverified = self._decode(plan, indexes, live, layout)
        passed = {*plan.chain, plan.seed_version} if plan.seed == "full" else {*plan.chain}
        return Fetched(
            plan=plan,
            stream_id=live.stream_id if newest is None else newest.stream_id or live.stream_id,
            digests={version: index.digest for version, index in sorted(indexes.items()) if version in passed},
            files=files,
            is_unverified=unverified,
            stats=stats,
            seconds={"fetch": fetched - began, "decode": time.monotonic() - fetched},
        )

    def reset(self) -> None:
        """Make the local checkpoint the base, whatever it was."""
        self.let_go()
        pull(
            local_checkpoint_dir=self._local,
            base_dir=self._sources.base_dir,
            source_dir=self._sources.source_dir,
            target_version=0,
            lock_timeout=self._timeout_s,
            workers=self._workers,
        )

    def accept(self, target: int) -> None:
        """Make a fetched version durable."""
        if self.mirror.has_candidate(target):
            self.mirror.accept(target)

    def drop(self, target: int) -> None:
        """Forget a candidate, and everything that was held for it."""
        self.mirror.discard(target)
        self.let_go()

    def flush(self, timeout_s: float) -> None:
        self.let_go()
        self.mirror.flush(timeout_s)

    def close(self) -> None:
        self.let_go()
        if self._decoder is not None:
            self._decoder.close()
        self.mirror.close()

    def _decode(
        self, plan: Plan, indexes: Mapping[int, VersionIndex], live: Applied, layout: LayoutMap
    ) -> tuple[DecodeStats, str | None, bool]:
        """`(stats, directory of the files, whether checksums are our own)`; no directory where the live weights cannot
        be brought there in place."""
        nothing = DecodeStats(wire_bytes=0, compact_bytes=0)
        full = None
        if plan.is_nothing or live.version is None or plan.seed == "base":
            return nothing, None, False
        if plan.seed == "full":
            full = self.mirror.find_received(plan.seed_version, indexes[plan.seed_version].digest)
            if full is None or full.kind != "full":
                return nothing, None, False  # its files have become the mirror's
        directory = self.mirror.make_scratch()
        self._scratch.append(directory)
        stats = self._run(plan, indexes, directory)
        if full is None:
            return stats, os.fspath(directory), False
        checkpoint = read_checkpoint(full.path(self.mirror.control))
        layout.check_tensors(checkpoint.tensors)
        receipt = read_receipt(full, self.mirror.control)
        updates = full_updates(checkpoint, receipt.checksums, version=full.version)
        if plan.chain:
            updates = followed_by(updates, read_updates(directory / UPDATES_FILE))
        write_updates(directory / UPDATES_FILE, updates)
        unverified = indexes[plan.seed_version].checksum_format is None
        stats = DecodeStats(wire_bytes=full.nbytes + stats.wire_bytes, compact_bytes=stats.compact_bytes)
        return stats, os.fspath(directory), unverified

    def _run(self, plan: Plan, indexes: Mapping[int, VersionIndex], directory: Path) -> DecodeStats:
        if not plan.chain:
            (directory / COMPACT_FILE).touch()
            return DecodeStats(wire_bytes=0, compact_bytes=0)
        places = [Place(directory=self._where(version, indexes[version]), version=version) for version in plan.chain]
        job = DecodeJob(
            places=tuple(places), base_dir=self._sources.base_dir, directory=directory, workers=self._workers
        )
        return run_job(job) if self._decoder is None else self._decoder.run(job, timeout_s=self._timeout_s)

    def _where(self, version: int, index: VersionIndex) -> Path:
        """The copy on this host, else the stream itself."""
        entry = self.mirror.find_received(version, index.digest)
        return self._sources.source_dir if entry is None else entry.directory(self.mirror.control)


def require_leader(host: Host | None, rank: int) -> Host:
    if host is None:
        raise MirrorError("only the leader of a host knows what is durable there", found=f"rank {rank}")
    return host
