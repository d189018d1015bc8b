"""Weight synchronisation of one rank: attach to a model that serves, then bring its live weights to published versions.

`prepare` does all the work and verifies it on every rank while the model serves; `commit` changes the live weights in
place, on all ranks or on none. What is not a patch in place (a tensor that the engine rearranges, live weights that are
no known version) is committed by an ordinary reload from the local checkpoint, and says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from gpusync.errors import DigestMismatchError, MirrorError, RefusedError
from gpusync.hooks import Hook
from gpusync.layout import DERIVED, DerivedRegistry, LayoutMap
from gpusync.mirror.look import Sources
from gpusync.plan import Applied, Plan
from gpusync.progress import Progress
from gpusync.store.choose_memory import Want, choose_memory
from gpusync.store.compact import StepFiles
from gpusync.store.decoding import COMPACT_FILE, UPDATES_FILE
from gpusync.store.digests import digest_over
from gpusync.store.load import dense_bytes
from gpusync.store.rank import STAGING_BYTES
from gpusync.store.tensor_update import TensorUpdate, read_updates
from gpusync.sync.host import Fetched, Host, require_leader
from gpusync.sync.live import LazyBase, LiveModel, LoadWeights
from gpusync.sync.report import Clock, CommitPath, Prepared, SyncReport
from gpusync.verdict import Group, InDoubtError, guard, open_group, take_step

Verify = Literal["before+after", "before"]
T = TypeVar("T")
EXPIRES_AFTER_S = 1800.0
BASE_WAIT_S = 60.0


class WeightSync:
    """One per rank, on every rank of `group` (None: this process alone).

    `load_weights` is the engine's own, of `model` as it serves; where that does more than copy, `twin` is a second
    model, not loaded and never used again, and `load_weights` is the twin's. `layout`, if it is given, was traced
    before, for a checkpoint like the base, and no loader is run here. `reload(directory)` is the engine's
    ordinary reload; by default the tensors of the directory go through `load_weights`, which must be the model's then.
    `derived` holds the functions that recompute what the engine made of params. `verify`: whether live bytes are
    compared again after a commit. `device`: "gpu" fails where params are not on one. `staging_bytes` bounds scratch
    beside the params. What is prepared expires after `expires_after` seconds. Every wait ends after `timeout` seconds.
    `decode_in_process` saves the helper process that the leader of a host has for decoding, at the price of this
    process's time. `progress(done, total)` is told bytes of changed tensors as they are verified.

    Made while nothing else changes the weights. `version` is what is live and verified, None when that is unknown: the
    next commit is a reload then. Methods may be called from any thread, one at a time.
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
        device: Want = "auto",
        verify: Verify = "before+after",
        staging_bytes: int = STAGING_BYTES,
        expires_after: float = EXPIRES_AFTER_S,
        timeout: float = 600.0,
        visibility_timeout: float = 0.0,
        pre_read_hook: Hook | str | None = None,
        workers: int | None = None,
        decode_in_process: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._local = Path(local_checkpoint_dir)
        sources = Sources(source_dir=Path(source_dir), base_dir=Path(base_dir))
        self._live = LiveModel(
            model,
            load_weights=load_weights,
            twin=twin,
            layout=layout,
            derived=derived,
            sources=sources,
            local_checkpoint_dir=self._local,
            choose_memory=lambda params: choose_memory(params, want=device)[0],
        )
        self._reload = self._live.load if reload is None else reload
        self._verify, self._staging_bytes, self._timeout = verify, staging_bytes, timeout
        self._expires_after, self._progress = expires_after, progress
        self.report: SyncReport | None = None
        self._prepared: Prepared | None = None
        self._doubt: tuple[Prepared, str] | None = None
        self._invalid: str | None = None
        self._holds_are_stale = False
        self._expiry: threading.Timer | None = None
        self._turn = threading.RLock()
        self._host: Host | None = None
        self._group: Group = open_group(group, local_checkpoint_dir=local_checkpoint_dir, timeout_s=timeout)
        self._host_options: dict[str, Any] = {
            "pre_read_hook": pre_read_hook,
            "timeout_s": timeout,
            "visibility_timeout_s": visibility_timeout,
            "workers": workers or min(8, os.cpu_count() or 1),
            "in_process": decode_in_process,
        }
        self._sources = sources
        self._enter("attach", None)

    @property
    def version(self) -> int | None:
        """What is live and verified; None when that is not known."""
        return None if self._invalid is not None else self._live.version

    @property
    def prepared(self) -> Prepared | None:
        """What waits for its commit."""
        return self._prepared

    @property
    def durable_version(self) -> int | None:
        """The newest version that this host can rebuild after a crash. Only its leader knows."""
        return require_leader(self._host, self._group.rank).mirror.status().durable_version

    @property
    def in_doubt(self) -> str | None:
        """Why this rank does not know what was decided. It must serve nothing until its next call has resolved it."""
        doubt = self._group.in_doubt
        return None if self._doubt is None or doubt is None else f"the decision on {doubt[1]} is not known here"

    @property
    def ready(self) -> bool:
        """Whether this rank may serve, and what it serves is known."""
        return self._doubt is None and self.version is not None

    def pull(self, target: int) -> SyncReport:
        """`prepare`, then `commit`."""
        return self.commit(self.prepare(target))

    def prepare(self, target: int) -> Prepared:
        """Verify `target` on every rank and make it durable on every host; live weights are not written.

        A collective. The same target again returns the pending result; another one drops it. 0 makes the local
        checkpoint the base again. On any error nothing has changed, and every rank raises: its own error where it
        failed, PeerFailedError elsewhere.
        """
        with self._turn:
            transaction = self._enter("prepare", target)
            if self._prepared is not None:
                return self._prepared
            if self._host is None:
                prepared = self._prepare(target, transaction)
            else:
                try:
                    prepared = self._prepare(target, transaction)
                except BaseException:
                    self._host.drop(target)
                    raise
            self._prepared = prepared
            self._expire_later(prepared)
            return prepared

    def commit(self, prepared: Prepared) -> SyncReport:
        """Make a prepared version live: on every rank, or on none, in which case the old version is live everywhere.

        A collective; the model must not run meanwhile. InDoubtError: this rank cannot learn the decision; it must not
        serve until the next call here has resolved it.
        """
        with self._turn:
            clock = Clock()
            is_current = prepared is self._prepared
            transaction = self._enter("commit", prepared.version if is_current else None)
            self._prepared = None
            self._cancel_expiry()
            with clock.stage("commit"):
                if prepared.report.commit_path == "in place":
                    self._commit_in_place(prepared, transaction, clock)
                elif prepared.report.commit_path == "reload":
                    self._commit_by_reload(prepared, transaction, clock)
                self._settle(prepared)
            clock.seconds["commit"] -= clock.seconds["fingerprint"] + clock.seconds["fold"]
            seconds = {
                name: prepared.report.seconds.get(name, 0.0) + more for name, more in clock.seconds.items()
            }  # fmt: skip
            self.report = replace(prepared.report, seconds=seconds)
            return self.report

    def abort(self, prepared: Prepared | None = None) -> None:
        """Drop what is prepared. An accepted version stays durable, and folds."""
        with self._turn:
            pending = self._prepared
            if pending is not None and (prepared is None or prepared is pending):
                self._drop_prepared()

    def invalidate(self, reason: str) -> None:
        """Something else has changed, moved or released the weights: what is live is unknown from now on, and the next
        commit is a reload. Not a collective: the other ranks learn it at the next call."""
        with self._turn:
            self._invalid = reason
            self.abort()

    def flush(self, timeout: float | None = None) -> None:
        """Drop what is prepared, and wait until the local checkpoint's files hold all that is durable, on every host.
        A collective. MirrorError after `timeout` seconds."""
        with self._turn:
            transaction = self._enter("flush", None)
            limit = self._timeout if timeout is None else timeout
            self._step("folding the local checkpoint", lambda: self._flush(limit), transaction, "flush")

    def close(self) -> None:
        with self._turn:
            self._cancel_expiry()
            self._drop_prepared()
            if self._host is not None:
                self._host.close()
            self._group.close()

    # entering: all ranks do the same thing, from the same state

    def _enter(self, what: str, target: int | None) -> str:
        """Begin a transaction in which all ranks do the same; returns its name.

        Decisions that were missed are resolved first. Where a rank is new in the group, all attach before anything
        else. What ranks do not agree on (what is live, what is prepared) none of them has.
        """
        self._resolve_doubt()
        while True:
            transaction = self._group.begin("a transaction", timeout_s=self._timeout)
            mine = [
                what,
                target,
                None if self._prepared is None else self._prepared.version,
                self.version,
                self._invalid,
            ]
            told = self._group.gather_objects(mine, timeout_s=self._timeout)
            if any(each[0] == "attach" for each in told):
                self._attach(transaction)
                if what == "attach":
                    return transaction
                continue
            if self._holds_are_stale:
                self._holds_are_stale = False
                self._drop_holds()
            self._settle_differences(told)
            if any(each[:2] != mine[:2] for each in told):
                asked = {rank: f"{each[0]} {each[1]}" for rank, each in enumerate(told)}
                raise RefusedError("ranks were asked for different things, or hold different versions", found=asked)
            if what == "commit" and (target is None or self._prepared is None):
                raise RefusedError("what is to be committed is no longer prepared", version=target)
            if what == "prepare" and self._prepared is not None and self._prepared.version != target:
                self._drop_prepared()
            if what == "flush":
                self._drop_prepared()
            return transaction

    def _settle_differences(self, told: list[list[Any]]) -> None:
        if any(each[2] != told[0][2] for each in told):
            self._drop_prepared()
        if any(each[3] != told[0][3] for each in told) or any(each[4] is not None for each in told):
            self._drop_prepared()
            self._live.forget()
        self._invalid = None

    def _attach(self, transaction: str) -> None:
        """Find out where everything is and which version is live."""
        self._drop_prepared()
        self._step("opening the local checkpoint", self._open_host, transaction, "mirror")
        self._step("tracing the layout", self._live.trace, transaction, "trace")
        self._identify(transaction)

    def _open_host(self) -> None:
        if self._group.is_leader:
            if self._host is None:
                self._host = Host(self._local, self._sources, **self._host_options)
            self._host.hold(0)  # the files are about to be read

    def _identify(self, transaction: str) -> None:
        found = self._step("identifying the live version", self._live.identify, transaction, "identify")
        told = self._group.gather_objects(found, timeout_s=self._timeout)
        version = found if all(each == found for each in told) else None
        held = self._step(
            "judging the layout",
            lambda: self._live.judge(
                version,
                lambda shards: digest_over(self._group, shards, timeout_s=self._timeout),
                staging_bytes=self._staging_bytes,
            ),
            transaction,
            "judge",
        )
        everyone = self._group.gather_objects(held, timeout_s=self._timeout)
        names = sorted({name for each in everyone for name in each})
        self._live.store.held_by_any = {name: max(each.get(name, 0) for each in everyone) for name in names}
        self._invalid = None
        if self._host is not None:
            self._host.let_go()

    # prepare

    def _prepare(self, target: int, transaction: str) -> Prepared:
        clock = Clock()
        if target == 0:
            return self._prepare_base(transaction, clock)
        fetched = self._fetch(target, transaction, clock)
        updates = self._read_updates(fetched)
        base = LazyBase(self._live, timeout_s=min(self._timeout, BASE_WAIT_S))
        path, reason = self._choose_path(fetched, updates, base)
        update = None
        if path == "in place":
            update = self._verify_update(updates, fetched, base, transaction, clock)
        self._step("making the version durable", lambda: self._accept(target), transaction, "accept", clock)
        applier, decoder = self._live.memory.backend
        report = SyncReport(
            version=target,
            version_before=self._live.version,
            chain=fetched.plan.chain,
            commit_path=path,
            reason=reason,
            decoder=decoder,
            applier=applier,
            verified="unverified-source" if fetched.is_unverified else "checksums",
            tensors_changed=len(updates),
            repaired=() if update is None else tuple(update.repaired),
            wire_bytes=fetched.stats.wire_bytes,
            compact_bytes=fetched.stats.compact_bytes,
            touched_bytes=0 if update is None else update.touched_bytes,
            exchanged_bytes=0 if update is None else update.traffic.nbytes,
            streamed_bytes=0 if update is None else update.streamed_bytes,
            peak_staging_bytes=self._live.memory.peak_bytes,
            bytes_by_class=self._live.layout.bytes_by_class(),
            seconds=clock.seconds,
        )
        applied = fetched.applied_after(self._live.applied)
        return Prepared(version=target, plan=fetched.plan, report=report, applied=applied, update=update, base=base)

    def _prepare_base(self, transaction: str, clock: Clock) -> Prepared:
        """The local checkpoint becomes the base; what is live and is something else is unknown from then on."""

        def reset() -> None:
            if self._host is not None:
                self._host.reset()

        before = self._live.version
        self._step("resetting the local checkpoint", reset, transaction, "reset", clock)
        if before != 0:
            self._live.forget()
        plan = Plan(target=0, seed="base", seed_version=0, chain=(), reason="version 0 is the engine's own base")
        report = SyncReport(
            version=0,
            version_before=before,
            chain=(),
            commit_path="nothing" if before == 0 else "reload",
            reason="live is the base already" if before == 0 else plan.reason,
            applier=self._live.memory.backend[0],
            bytes_by_class=self._live.layout.bytes_by_class(),
            seconds=clock.seconds,
        )
        return Prepared(version=0, plan=plan, report=report, applied=Applied(version=0))

    def _fetch(self, target: int, transaction: str, clock: Clock) -> Fetched:
        """Every leader fetches; returns what this host's own has found. All hosts must have found the same."""

        def fetch() -> Fetched | None:
            if self._host is None:
                return None
            return self._host.fetch(target, self._live.applied, self._live.layout)

        mine = self._step("fetching", fetch, transaction, "fetch")
        told = self._group.gather_objects(None if mine is None else mine.as_told(), timeout_s=self._timeout)
        found = {leader: Fetched.from_told(told[leader]) for leader in self._group.leaders}
        fetched = found[self._group.leader]
        for stage, seconds in fetched.seconds.items():
            clock.add(stage, seconds)
        first = found[self._group.leaders[0]]
        if any(each.outcome != first.outcome for each in found.values()):
            # Hosts whose files are elsewhere decode nothing; then nobody commits in place.
            if any(each.digests != first.digests for each in found.values()):
                raise MirrorError("the hosts see different streams", version=target, path=self._sources.source_dir)
            fetched = replace(fetched, files=None)
        return fetched

    def _read_updates(self, fetched: Fetched) -> dict[str, TensorUpdate]:
        return {} if fetched.files is None else read_updates(Path(fetched.files) / UPDATES_FILE)

    def _choose_path(
        self, fetched: Fetched, updates: Mapping[str, TensorUpdate], base: LazyBase
    ) -> tuple[CommitPath, str]:
        """How the commit will be made, and why; the same on all ranks."""
        plan = fetched.plan
        if plan.is_nothing:
            return "nothing", plan.reason
        told = self._group.gather_objects(self._why_reload(fetched, updates, base), timeout_s=self._timeout)
        reason = next((each for each in told if each is not None), None)
        return ("in place", plan.reason) if reason is None else ("reload", reason)

    def _why_reload(self, fetched: Fetched, updates: Mapping[str, TensorUpdate], base: LazyBase) -> str | None:
        """Why this rank cannot bring its weights there in place."""
        plan = fetched.plan
        if fetched.files is None:
            return f"starts from the {plan.seed} version {plan.seed_version} ({plan.reason})"
        opaque = self._live.store.opaque_among(updates)
        if opaque:
            name, why = next(iter(opaque.items()))
            return f"{len(opaque)} changed tensors cannot be patched in place, `{name}` among them: {why}"
        dense = sum(dense_bytes(step, update.nbytes) for update in updates.values() for step in update.steps)
        if dense > self._live.store.dense_bytes and base.reader is None:
            return f"{dense} dense bytes could not be rolled back: the files do not hold version {self._live.version}"
        return None

    def _verify_update(
        self,
        updates: Mapping[str, TensorUpdate],
        fetched: Fetched,
        base: LazyBase,
        transaction: str,
        clock: Clock,
    ) -> Any:
        store, files = self._live.store, StepFiles(Path(str(fetched.files)) / COMPACT_FILE)
        self._live.memory.reset_peak()
        room = self._step("making room for scratch", lambda: store.reserve(updates), transaction, "room", clock)
        room = min(self._group.gather_objects(room, timeout_s=self._timeout))
        update = self._step(
            "verifying",
            lambda: store.prepare(updates, files, room=room, base=base, progress=self._progress),
            transaction,
            "verify",
            clock,
        )
        for stage, seconds in update.watch.seconds.items():
            if stage != "total":
                clock.add(stage, seconds)
        return update

    def _accept(self, target: int) -> None:
        if self._host is not None:
            self._host.accept(target)

    # commit

    def _commit_in_place(self, prepared: Prepared, transaction: str, clock: Clock) -> None:
        update, store = prepared.update, self._live.store
        if update is None:
            raise RefusedError("nothing was prepared", version=prepared.version)

        def write() -> None:
            store.commit(update, base=prepared.base)
            self._live.recompute(update.names)
            with clock.stage("fingerprint"):
                wrong = store.verify(update) if self._verify == "before+after" else None
            if wrong is not None:
                raise DigestMismatchError(
                    "live bytes are not what was verified before the commit", tensor=wrong, version=prepared.version
                )

        verdict = guard(write)
        try:
            decision = self._group.agree(verdict, transaction=transaction, phase="commit", timeout_s=self._timeout)
        except InDoubtError:
            self._doubt = (prepared, transaction)
            raise
        if not decision.ok:
            self._roll_back(prepared)
        decision.check(verdict, what=f"committing version {prepared.version}")

    def _roll_back(self, prepared: Prepared) -> None:
        """Undo this rank's commit. Where that fails, it says so: no version is live here, and none on the others once
        they hear of it at the next call."""
        update = prepared.update

        def undo() -> None:
            if update is not None:
                self._live.store.roll_back(update, base=prepared.base)
                self._live.recompute(update.names)

        verdict = guard(undo)
        if not verdict.ok:
            self._live.forget()
        prepared.close()
        # Other ranks may still be reading old bytes from the files: those are held until all have come again.
        self._holds_are_stale = True

    def _commit_by_reload(self, prepared: Prepared, transaction: str, clock: Clock) -> None:
        with clock.stage("fold"):
            self._step(
                "folding the local checkpoint", lambda: self._flush(self._timeout), transaction, "flush"
            )  # fmt: skip
        self._live.forget()
        self._step("reloading", lambda: self._reload(self._local), transaction, "reload")
        if self._host is not None:
            self._host.hold(0)
        self._step("binding the layout", self._live.bind, transaction, "bind")
        self._identify(transaction)
        if self._live.version != prepared.version:
            raise MirrorError(
                "the reload did not bring the weights to the version",
                path=self._local,
                version=prepared.version,
                found=self._live.version,
            )

    def _flush(self, timeout_s: float) -> None:
        if self._host is not None:
            self._host.flush(timeout_s)

    def _settle(self, prepared: Prepared) -> None:
        self._live.applied = prepared.applied
        self._let_go(prepared)

    def _let_go(self, prepared: Prepared) -> None:
        prepared.close()
        self._drop_holds()

    def _drop_holds(self) -> None:
        if self._host is not None:
            self._host.let_go()

    def _resolve_doubt(self) -> None:
        """Learn a decision that was missed, and act on it."""
        missed = self._group.in_doubt
        if missed is None:
            return
        decision = self._group.resolve(*missed, timeout_s=self._timeout)
        if self._doubt is None:
            return  # of a step of prepare, of which nothing is left
        prepared, _ = self._doubt
        self._doubt = None
        if decision.ok:
            self._settle(prepared)
        else:
            self._roll_back(prepared)

    # what is prepared

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        self._cancel_expiry()
        if prepared is not None:
            self._let_go(prepared)

    def _expire_later(self, prepared: Prepared) -> None:
        def expire() -> None:
            with self._turn:
                if self._prepared is prepared:
                    self._drop_prepared()

        self._expiry = threading.Timer(self._expires_after, expire)
        self._expiry.daemon = True
        self._expiry.start()

    def _cancel_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _step(self, what: str, work: Callable[[], T], transaction: str, phase: str, clock: Clock | None = None) -> T:
        """One step of all ranks. With a clock, what it takes beyond the work itself is counted as agreeing."""
        began, worked = time.monotonic(), 0.0

        def timed() -> T:
            nonlocal worked
            start = time.monotonic()
            try:
                return work()
            finally:
                worked = time.monotonic() - start

        try:
            return take_step(self._group, what, timed, transaction=transaction, phase=phase, timeout_s=self._timeout)
        finally:
            if clock is not None:
                clock.add("agree", time.monotonic() - began - worked)
