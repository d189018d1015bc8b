"""The leader's part for the ranks of one host: fetch a version once, decode it once, keep it durable.

What it tells its ranks is a small record; steps and words lie in files on this host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusync.disk import pull
from gpusync.errors import ChainError, MirrorError, VersionMissingError
from gpusync.helper import HelperProcess
from gpusync.hooks import Hook
from gpusync.layout import LayoutMap, ReadTensor
from gpusync.mirror import io
from gpusync.mirror.inbox import Entry
from gpusync.mirror.look import Sources, plan_ahead, read_published
from gpusync.mirror.mirror import Mirror
from gpusync.mirror.receive import read_receipt
from gpusync.plan import Applied, Plan
from gpusync.store.decoding import COMPACT_FILE, UPDATES_FILE, DecodeJob, DecodeStats
from gpusync.store.leader import Place, followed_by, full_updates, verify_rest
from gpusync.store.tensor_update import read_updates, write_updates
from gpusync.stream import Checkpoint, OpenFiles, VersionIndex, read_checkpoint
from gpusync.sync.checkpoints import reader_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a leader tells its ranks of a version that is on this host. `files`: where the compact file and the updates
    lie, None where there are none; `why_reload` says why then. `is_unverified`: nobody has published checksums of it,
    and the leader's are used."""

    plan: Plan
    stream_id: str | None
    digests: Mapping[int, str]
    files: str | None = None
    why_reload: str | None = None
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
            "why_reload": self.why_reload,
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
            why_reload=told["why_reload"],
            is_unverified=told["is_unverified"],
            stats=DecodeStats(wire_bytes=told["stats"][0], compact_bytes=told["stats"][1]),
            seconds=told["seconds"],
        )

    def applied_after(self, before: Applied) -> Applied:
        """What a store that was at `before` holds once this is live."""
        digests = {**({} if self.plan.reseeds else before.digests), **self.digests}
        return Applied(version=self.plan.target, stream_id=self.stream_id, digests=digests)


_NOTHING = DecodeStats(wire_bytes=0, compact_bytes=0)


class Host:
    """The mirror of this host and the helpers that decode and fold, on the rank that leads it."""

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
            in_process=in_process,
        )
        self._decoder = None if in_process else HelperProcess("decodes")
        self._held: list[int] = []
        self._scratch: list[Path] = []
        self._full: Entry | None = None
        self._places: tuple[Place, ...] = ()

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
        with io.explained("a version cannot be fetched", self._local):
            return self._fetch(target, live, layout)

    def _fetch(self, target: int, live: Applied, layout: LayoutMap) -> Fetched:
        began = time.monotonic()
        # Ranks may roll back to what is live: the files must not go past it.
        self.hold(target if live.version is None else min(target, live.version + 1))
        durable = self.mirror.status().durable_version
        if durable is None or durable < target or live.version is None or live.version > target:
            self.mirror.receive(target, visibility_timeout=self._visibility_timeout_s)
        try:
            plan, indexes = plan_ahead(self._sources, live, target=target)
        except VersionMissingError as error:
            if durable != target:
                raise
            # What leads from the live weights to there was pruned; this host has it all.
            plan = Plan(target=target, seed="store", seed_version=target, chain=(), reason="the local files hold it")
            return Fetched(plan=plan, stream_id=None, digests={}, why_reload=f"live weights cannot follow: {error}")
        fetched = time.monotonic()
        newest = indexes.get(target)
        why_reload = self._why_not_in_place(plan, indexes, live, layout)
        stats, files, unverified = (_NOTHING, None, False) if why_reload else self._decode(plan, indexes, layout)
        if why_reload is not None and durable is not None and durable > target:
            raise ChainError(
                "live weights can only be reloaded, and the local files hold a newer version",
                version=target,
                expected=f"a target of {durable} or more",
            )
        passed = {*plan.chain, plan.seed_version} if plan.seed == "full" else {*plan.chain}
        return Fetched(
            plan=plan,
            stream_id=live.stream_id if newest is None else newest.stream_id or live.stream_id,
            digests={version: index.digest for version, index in sorted(indexes.items()) if version in passed},
            files=files,
            why_reload=why_reload,
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
        try:
            self.mirror.discard(target)
        finally:
            self.let_go()

    def flush(self, timeout_s: float) -> None:
        """Wait until the files hold all that is durable. MirrorError too if a version that was accepted is not any
        more: it was wrong, or what it needs has gone."""
        accepted = self.mirror.status().durable_version
        self.let_go()
        self.mirror.flush(timeout_s)
        durable = self.mirror.status().durable_version
        if accepted is not None and (durable is None or durable < accepted):
            raise MirrorError(
                "an accepted version could not be folded", path=self._local, expected=accepted, found=durable
            )

    def close(self) -> None:
        try:
            self.let_go()
            if self._decoder is not None:
                self._decoder.close()
        finally:
            self.mirror.close()

    def _why_not_in_place(
        self, plan: Plan, indexes: Mapping[int, VersionIndex], live: Applied, layout: LayoutMap
    ) -> str | None:
        """Why the live weights cannot be brought there by steps; LayoutError for a full version of another model."""
        self._full = None
        if plan.seed == "full":
            self._full = self.mirror.find_received(plan.seed_version, indexes[plan.seed_version].digest)
            self._full = None if self._full is None or self._full.kind != "full" else self._full
            found = read_published(self._sources, plan.seed_version) if self._full is None else self._full_checkpoint()
            layout.check_tensors(found.tensors)
        if plan.is_nothing:
            return None
        if live.version is None:
            return f"live weights are no known version, and the way starts from {plan.seed} {plan.seed_version}"
        if plan.seed == "base" or (plan.seed == "full" and self._full is None):
            return f"starts from the {plan.seed} version {plan.seed_version} ({plan.reason})"
        return None

    def _full_checkpoint(self) -> Checkpoint:
        if self._full is None:
            raise MirrorError("there is no full version here", path=self._local)
        return read_checkpoint(self._full.path(self.mirror.control))

    def _decode(
        self, plan: Plan, indexes: Mapping[int, VersionIndex], layout: LayoutMap
    ) -> tuple[DecodeStats, str | None, bool]:
        """`(stats, directory of the files, whether checksums are our own)`."""
        self._places = tuple(
            Place(directory=self._where(version, indexes[version]), version=version) for version in plan.chain
        )
        if plan.is_nothing:
            return _NOTHING, None, False
        directory = self.mirror.make_scratch()
        self._scratch.append(directory)
        stats = self._run(directory)
        if self._full is None:
            return stats, os.fspath(directory), False
        receipt = read_receipt(self._full, self.mirror.control)
        updates = full_updates(self._full_checkpoint(), receipt.checksums, version=self._full.version)
        if plan.chain:
            updates = followed_by(updates, read_updates(directory / UPDATES_FILE))
        write_updates(directory / UPDATES_FILE, updates)
        unverified = indexes[plan.seed_version].checksum_format is None
        stats = DecodeStats(wire_bytes=self._full.nbytes + stats.wire_bytes, compact_bytes=stats.compact_bytes)
        return stats, os.fspath(directory), unverified

    def verify_rest(self, held: Collection[str], base: ReadTensor | None) -> None:
        """Verify what was fetched of tensors that no rank holds; `base` reads the live version's bytes. Where it is
        None, the files have gone past that version, by a fold that has verified them."""
        if self._full is not None:
            start = self._full_checkpoint()
            with OpenFiles() as files:
                verify_rest(self._places, start, reader_of(start, files), but=held)
        elif base is not None:
            verify_rest(self._places, self._sources.read_base(), base, but=held)

    def _run(self, directory: Path) -> DecodeStats:
        if not self._places:
            (directory / COMPACT_FILE).touch()
            return _NOTHING
        job = DecodeJob(
            places=self._places, base_dir=self._sources.base_dir, directory=directory, workers=self._workers
        )
        return job.run() if self._decoder is None else self._decoder.run(job, timeout_s=self._timeout_s)

    def _where(self, version: int, index: VersionIndex) -> Path:
        """The copy on this host, else the stream itself."""
        entry = self.mirror.find_received(version, index.digest)
        return self._sources.source_dir if entry is None else entry.directory(self.mirror.control)


def require_leader(host: Host | None, rank: int) -> Host:
    if host is None:
        raise MirrorError("only the leader of a host knows what is durable there", found=f"rank {rank}")
    return host
