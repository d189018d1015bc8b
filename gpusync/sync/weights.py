"""Weight synchronisation of one rank: attach to a model that serves, then bring its live weights to published versions.

`prepare` does all the work and verifies it on every rank while the model serves; `commit` changes the live weights in
place, on all ranks or on none. What is not a patch in place (a full version, a tensor that the engine rearranges) is
committed by an ordinary reload from the local checkpoint, and says so.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from gpusync.disk import pull
from gpusync.errors import DigestMismatchError, GpusyncError, MirrorError, RefusedError
from gpusync.hooks import Hook
from gpusync.layout import DERIVED, DerivedRegistry, LayoutMap, attach, compare, identify, named_tensors, trace
from gpusync.mirror.local import read_local_version
from gpusync.mirror.look import Sources, plan_ahead, read_chain
from gpusync.mirror.mirror import Mirror
from gpusync.plan import Applied, Plan
from gpusync.store.casts import CastStore
from gpusync.store.compact import CompactFile
from gpusync.store.digests import digest_over
from gpusync.store.leader import decode_chain, decode_updates, encode_updates
from gpusync.store.memory import HostMemory
from gpusync.store.rank import STAGING_BYTES, RankStore, TensorUpdate
from gpusync.stream import Checkpoint, OpenFiles, read_checkpoint
from gpusync.sync.checkpoints import reader_of, torch_tensors
from gpusync.sync.report import Clock, CommitPath, Prepared, SyncReport
from gpusync.verdict import Group, InDoubtError, guard, open_group, take_step

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Verify = Literal["before+after", "before"]


class WeightSync:
    """One per rank, on every rank of `group` (None: this process alone).

    `load_weights` is the engine's own, of `model` as it serves; where that does more than copy, `twin` is a second
    model, not loaded and never used again, and `load_weights` is the twin's. `layout`, if it is given, was traced
    before, for a checkpoint like the base: no loader is run here. `reload(directory)` is the engine's ordinary reload;
    by default the tensors of the directory go through `load_weights`, which must be the model's then.
    `derived` holds the functions that recompute what the engine made of params. `verify`: whether live bytes are
    compared again after a commit. Every wait ends after `timeout` seconds.

    Made while nothing else changes the weights. `version` is what is live and verified, None when that is unknown: the
    next commit is a reload then.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        load_weights: LoadWeights,
        base_dir: str | os.PathLike[str],
        local_checkpoint_dir: str | os.PathLike[str],
        source_dir: str | os.PathLike[str],
        group: Any | None = None,
        twin: torch.nn.Module | None = None,
        layout: LayoutMap | None = None,
        reload: Callable[[Path], object] | None = None,
        derived: DerivedRegistry = DERIVED,
        verify: Verify = "before+after",
        staging_bytes: int = STAGING_BYTES,
        timeout: float = 600.0,
        visibility_timeout: float = 0.0,
        pre_read_hook: Hook | str | None = None,
        workers: int | None = None,
    ) -> None:
        self._model, self._twin, self._load_weights, self._derived = model, twin, load_weights, derived
        self._traced = layout
        self._reload = self._load_directory if reload is None else reload
        self._sources = Sources(source_dir=Path(source_dir), base_dir=Path(base_dir))
        self._local = Path(local_checkpoint_dir)
        self._verify, self._staging_bytes = verify, staging_bytes
        self._timeout, self._visibility_timeout = timeout, visibility_timeout
        self._workers = workers or min(8, os.cpu_count() or 1)
        self.version: int | None = None
        self.report: SyncReport | None = None
        self._prepared: Prepared | None = None
        self._doubt: tuple[Prepared, str] | None = None
        self._mirror: Mirror | None = None
        self._group: Group = open_group(group, local_checkpoint_dir=local_checkpoint_dir, timeout_s=timeout)
        transaction = self._group.begin("attach", timeout_s=timeout)

        def open_mirror() -> None:
            if self._group.is_leader:
                self._mirror = Mirror(
                    self._local,
                    base_dir=base_dir,
                    source_dir=source_dir,
                    pre_read_hook=pre_read_hook,
                    lock_timeout=timeout,
                    workers=self._workers,
                )
                self._mirror.hold(0)  # the files are about to be read

        self._step("opening the local checkpoint", open_mirror, transaction, "mirror")
        self._step("tracing the layout", self._trace, transaction, "trace")
        self._attach(transaction)

    @property
    def prepared(self) -> Prepared | None:
        """What waits for its commit."""
        return self._prepared

    @property
    def in_doubt(self) -> str | None:
        """Why this rank does not know what was decided. It must serve nothing until its next call has resolved it."""
        doubt = self._group.in_doubt
        return None if self._doubt is None or doubt is None else f"the decision on {doubt[1]} is not known here"

    @property
    def ready(self) -> bool:
        """Whether this rank may serve, and what it serves is known."""
        return self._doubt is None and self.version is not None

    @property
    def durable_version(self) -> int | None:
        """The newest version that this host can rebuild after a crash."""
        if self._mirror is None:
            raise RefusedError(
                "only the leader of a host knows what is durable there", found=f"rank {self._group.rank}"
            )
        return self._mirror.status().durable_version

    def pull(self, target: int) -> SyncReport:
        """`prepare`, then `commit`."""
        return self.commit(self.prepare(target))

    def prepare(self, target: int) -> Prepared:
        """Verify `target` on every rank and make it durable on every host; live weights are not written.

        A collective. The same target again returns the pending result; another one drops it. On any error nothing has
        changed, and every rank raises: its own error where it failed, PeerFailedError elsewhere.
        """
        self._resolve_doubt()
        if self._prepared is not None and self._prepared.version == target:
            return self._prepared
        self.abort()
        clock = Clock()
        transaction = self._group.begin(f"prepare {target}", timeout_s=self._timeout)
        with tempfile.TemporaryDirectory(prefix="gpusync-") as scratch:
            try:
                prepared = self._prepare(target, transaction, Path(scratch) / "compact", clock)
            except BaseException:
                if self._mirror is not None:
                    self._mirror.discard(target)
                    self._mirror.release(target)
                raise
        self._prepared = prepared
        return prepared

    def commit(self, prepared: Prepared) -> SyncReport:
        """Make a prepared version live: on every rank, or on none, in which case the old version is live everywhere.

        A collective; the model must not run meanwhile. InDoubtError: this rank cannot learn the decision; it must not
        serve until the next call here has resolved it.
        """
        if prepared is not self._prepared:
            raise RefusedError("what is to be committed is no longer prepared", version=prepared.version)
        clock = Clock()
        transaction = self._group.begin(f"commit {prepared.version}", timeout_s=self._timeout)
        self._prepared = None
        if prepared.report.commit_path == "in place":
            self._commit_in_place(prepared, transaction)
        elif prepared.report.commit_path == "reload":
            self._commit_by_reload(prepared, transaction)
        self._settle(prepared)
        clock.lap("commit")
        self.report = replace(prepared.report, seconds={**prepared.report.seconds, **clock.seconds})
        return self.report

    def abort(self, prepared: Prepared | None = None) -> None:
        """Drop what is prepared. An accepted version stays durable, and folds."""
        pending = self._prepared
        if pending is None or (prepared is not None and prepared is not pending):
            return
        self._prepared = None
        if self._mirror is not None:
            self._mirror.release(pending.version)

    def flush(self, timeout: float) -> None:
        """Drop what is prepared here, and wait until the local checkpoint's files are at the durable version: an
        ordinary reload reads no old file then. A collective."""
        self.abort()
        transaction = self._group.begin("flush", timeout_s=timeout)

        def fold() -> None:
            if self._mirror is not None:
                self._mirror.flush(timeout)

        self._step("folding the local checkpoint", fold, transaction, "flush")

    def close(self) -> None:
        self.abort()
        if self._mirror is not None:
            self._mirror.close()
        self._group.close()

    # attach

    def _trace(self) -> None:
        base = self._sources.read_base()
        layout = self._traced
        if layout is None:
            traced, is_twin = (self._model, False) if self._twin is None else (self._twin, True)
            layout = trace(traced, self._load_weights, base.tensors, derived=self._derived, is_twin=is_twin)
        self._tensors = base.tensors
        self._params = named_tensors(self._model)
        self._layout: LayoutMap = attach(layout, self._params)[0]

    def _attach(self, transaction: str) -> None:
        """Find out which version is live, and judge the placements by its bytes."""
        found = self._step("identifying the live version", self._identify, transaction, "identify")
        told = self._group.gather_objects(found, timeout_s=self._timeout)
        self.version = found if all(each == found for each in told) else None
        self._step("judging the layout", self._judge, transaction, "judge")
        held = self._group.gather_objects(sorted(self._store.held), timeout_s=self._timeout)
        self._store.held_by_any = frozenset(name for names in held for name in names)
        if self._mirror is not None:
            self._mirror.release(0)

    def _identify(self) -> int | None:
        with OpenFiles() as files:
            candidates = [(version, reader_of(checkpoint, files)) for version, checkpoint, _ in self._known_versions()]
            return identify(self._layout, self._params, candidates)

    def _known_versions(self) -> Iterator[tuple[int, Checkpoint, Applied]]:
        """Versions whose bytes this host has: what the mirror's files hold, and the base."""
        known = read_local_version(self._local)
        if known is not None:
            yield known[0].version or 0, known[1], known[0]
        yield 0, self._sources.read_base(), Applied(version=0)

    def _judge(self) -> None:
        memory = HostMemory()
        self._applied = Applied()
        casts = CastStore(self._layout, self._params, memory=memory)
        for version, checkpoint, applied in self._known_versions():
            if version == self.version:
                with OpenFiles() as files:
                    read = reader_of(checkpoint, files)
                    self._layout = self._layout.demoted(compare(self._layout, self._params, read))
                    casts = CastStore(self._layout, self._params, memory=memory)
                    casts.fill(read)
                self._applied = applied
                break
        self._store = RankStore(
            self._layout,
            self._params,
            memory=memory,
            casts=casts,
            digest=lambda shards: digest_over(self._group, shards, timeout_s=self._timeout),
            staging_bytes=self._staging_bytes,
        )

    # prepare

    def _prepare(self, target: int, transaction: str, path: Path, clock: Clock) -> Prepared:
        message = self._step("fetching", lambda: self._fetch(target, path), transaction, "fetch")
        told = [json.loads(each) for each in self._group.gather_bytes(message.encode(), timeout_s=self._timeout)]
        mine = told[self._group.leader]
        plan = Plan(**{**mine["plan"], "chain": tuple(mine["plan"]["chain"])})
        clock.lap("fetch and decode")
        updates = decode_updates(mine["updates"])
        reason = self._why_reload(plan, updates, [told[leader] for leader in self._group.leaders])
        path_taken: CommitPath = "in place" if reason is None else "reload"
        if plan.is_nothing or target == self.version == 0:
            path_taken, reason = "nothing", plan.reason if plan.is_nothing else "the base is live"
        update = None
        if path_taken == "in place":
            file = Path(mine["path"])
            update = self._step(
                "verifying", lambda: self._store.prepare(updates, CompactFile(file)), transaction, "verify"
            )
            clock.lap("verify")
        self._step("making the version durable", lambda: self._accept(target), transaction, "accept")
        clock.lap("accept")
        report = SyncReport(
            version=target,
            version_before=self.version,
            chain=plan.chain,
            commit_path=path_taken,
            reason=reason or plan.reason,
            tensors_changed=len(updates),
            compact_bytes=sum(step.nbytes for each in updates.values() for step in each.steps),
            exchanged_bytes=0 if update is None else update.traffic.nbytes,
            bytes_by_class=self._layout.bytes_by_class(),
            seconds=clock.seconds,
        )
        applied = Applied(
            version=target,
            stream_id=mine["stream_id"],
            digests={
                **({} if plan.reseeds else self._applied.digests),
                **{int(v): d for v, d in mine["digests"].items()},
            },
        )
        return Prepared(version=target, plan=plan, report=report, update=update, applied=applied)

    def _fetch(self, target: int, path: Path) -> str:
        """The leader brings the version to this host and decodes it; what it tells its ranks, as JSON."""
        if self._mirror is None:
            return json.dumps({"plan": None, "updates": []})
        durable = self._mirror.status().durable_version
        if target == 0 and durable != 0:
            self._reset_mirror()
        self._mirror.hold(target)
        if target > 0 and (durable is None or durable < target or self.version is None or self.version > target):
            self._mirror.receive(target, visibility_timeout=self._visibility_timeout)
        plan, indexes = plan_ahead(self._sources, self._applied, target=target)
        updates = {}
        if plan.seed == "store" and plan.chain:
            start = Checkpoint(directory=self._local, tensors=self._tensors, headers={}, index=None, follow_links=True)
            versions = read_chain(self._sources, plan.chain, start)
            updates = decode_chain(versions, self._tensors, path, workers=self._workers)
        newest = indexes.get(target)
        return json.dumps(
            {
                "plan": {
                    "target": plan.target,
                    "seed": plan.seed,
                    "seed_version": plan.seed_version,
                    "chain": plan.chain,
                    "reason": plan.reason,
                },
                "path": str(path),
                "updates": encode_updates(updates),
                "stream_id": None if newest is None else newest.stream_id or self._applied.stream_id,
                "digests": {version: index.digest for version, index in indexes.items() if version in plan.chain},
            }
        )

    def _reset_mirror(self) -> None:
        """The local checkpoint becomes the base again, whatever it was: at once, as nothing of the stream is needed."""
        pull(
            local_checkpoint_dir=self._local,
            base_dir=self._sources.base_dir,
            source_dir=self._sources.source_dir,
            target_version=0,
            lock_timeout=self._timeout,
            workers=self._workers,
        )

    def _why_reload(self, plan: Plan, updates: Mapping[str, TensorUpdate], leaders: list[dict[str, Any]]) -> str | None:
        """Why the commit has to be a reload, on any rank; the same answer on all."""
        mine: str | None = None
        if any((each["plan"], each["digests"]) != (leaders[0]["plan"], leaders[0]["digests"]) for each in leaders):
            mine = "the hosts see different streams"
        elif plan.reseeds:
            mine = f"starts from the {plan.seed} version {plan.seed_version} ({plan.reason})"
        else:
            opaque = self._store.opaque_among(updates)
            if opaque:
                name, why = next(iter(opaque.items()))
                mine = f"{len(opaque)} changed tensors cannot be patched in place, `{name}` among them: {why}"
        told = self._group.gather_objects(mine, timeout_s=self._timeout)
        return next((each for each in told if each is not None), None)

    def _accept(self, target: int) -> None:
        if self._mirror is not None and self._mirror.has_candidate(target):
            self._mirror.accept(target)

    # commit

    def _commit_in_place(self, prepared: Prepared, transaction: str) -> None:
        update = prepared.update
        if update is None:
            raise RefusedError("nothing was prepared", version=prepared.version)

        def write() -> None:
            self._store.commit(update)
            self._recompute(update.names)
            wrong = self._store.verify(update) if self._verify == "before+after" else None
            if wrong is not None:
                raise DigestMismatchError(
                    "live bytes are not what was verified before the commit", tensor=wrong, version=prepared.version
                )

        verdict = guard(write)
        try:
            decision = self._group.agree(verdict, transaction=transaction, phase="commit", timeout_s=self._timeout)
        except InDoubtError:
            self.version, self._doubt = None, (prepared, transaction)
            raise
        if not decision.ok:
            self._roll_back(prepared, transaction)
        decision.check(verdict, what=f"committing version {prepared.version}")

    def _roll_back(self, prepared: Prepared, transaction: str) -> None:
        """Every rank undoes its commit. A rank that cannot leaves all of them without a known version."""
        update = prepared.update

        def undo() -> None:
            if update is not None:
                self._store.roll_back(update)
                self._recompute(update.names)

        verdict = guard(undo)
        decision = self._group.agree(verdict, transaction=transaction, phase="roll back", timeout_s=self._timeout)
        if self._mirror is not None:
            self._mirror.release(prepared.version)
        if not decision.ok:
            self.version, self._applied = None, Applied()

    def _commit_by_reload(self, prepared: Prepared, transaction: str) -> None:
        def flush() -> None:
            if self._mirror is not None:
                self._mirror.release(prepared.version)
                self._mirror.flush(self._timeout)

        self._step("folding the local checkpoint", flush, transaction, "flush")
        self.version = None
        self._step("reloading", lambda: self._reload(self._local), transaction, "reload")
        if self._mirror is not None:
            self._mirror.hold(0)
        self._attach(transaction)
        if self.version != prepared.version:
            raise MirrorError(
                "the reload did not bring the weights to the version",
                path=self._local,
                version=prepared.version,
                found=self.version,
            )

    def _settle(self, prepared: Prepared) -> None:
        self.version, self._applied = prepared.version, prepared.applied
        if self._mirror is not None:
            self._mirror.release(prepared.version)

    def _resolve_doubt(self) -> None:
        """Learn a decision that was missed, and act on it."""
        if self._doubt is None:
            return
        prepared, transaction = self._doubt
        decision = self._group.resolve(transaction, "commit", timeout_s=self._timeout)
        self._doubt = None
        if decision.ok:
            self._settle(prepared)
        elif prepared.update is not None:
            self._store.roll_back(prepared.update)
            self._recompute(prepared.update.names)
            self.version = prepared.report.version_before

    def _recompute(self, names: Iterable[str]) -> None:
        self._derived.recompute(self._model, self._layout.derived_modules(names))

    def _load_directory(self, directory: Path) -> None:
        if self._twin is not None:
            raise GpusyncError("a reload needs the engine's own function where a twin was traced", path=directory)
        checkpoint = read_checkpoint(directory, follow_links=True)
        with OpenFiles() as files, torch.no_grad():
            self._load_weights(torch_tensors(checkpoint, files))
        self._recompute(self._tensors)

    def _step(self, what: str, work: Callable[[], Any], transaction: str, phase: str) -> Any:
        return take_step(self._group, what, work, transaction=transaction, phase=phase, timeout_s=self._timeout)
