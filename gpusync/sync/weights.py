"""Weight synchronisation of one rank: attach to a model that serves, then bring its live weights to published versions.

`prepare` does all the work and verifies it on every rank while the model serves; `commit` changes the live weights in
place, on all ranks or on none. What is not a patch in place (a tensor that the engine rearranges, live weights that are
no known version) is committed by an ordinary reload from the local checkpoint, and says so.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from gpusync.errors import RefusedError
from gpusync.hooks import Hook
from gpusync.layout import DERIVED, DerivedRegistry, LayoutMap
from gpusync.mirror.look import Sources
from gpusync.progress import Progress
from gpusync.store.choose_memory import Want, choose_memory
from gpusync.store.rank import STAGING_BYTES
from gpusync.sync.committing import commit_by_reload, commit_in_place, roll_back
from gpusync.sync.host import Host, require_leader
from gpusync.sync.live import LiveModel, LoadWeights
from gpusync.sync.preparing import prepare_base, prepare_version
from gpusync.sync.rank import Rank
from gpusync.sync.report import Clock, Prepared, SyncReport
from gpusync.sync.team import Team
from gpusync.verdict import InDoubtError, open_group

Verify = Literal["before+after", "before"]
EXPIRES_AFTER_S = 1800.0
MAX_VERSION = 10**13


class WeightSync:
    """One per rank, on every rank of `group` (None: this process alone).

    `load_weights` is the engine's own, of `model` as it serves; where that does more than copy, `twin` is a second
    model, not loaded and never used again, and `load_weights` is the twin's. `layout`, if it is given, was traced
    before, for a checkpoint like the base, and no loader is run here. `reload(directory)` is the engine's
    ordinary reload; by default the tensors of the directory go through `load_weights`, which must be the model's then.
    `derived` holds the functions that recompute what the engine made of params. `verify`: whether live bytes are
    compared again after a commit. `device`: "gpu" fails where params are not on one. `staging_bytes` bounds scratch
    beside the params. What is prepared expires after `expires_after` seconds. Every wait ends after `timeout` seconds.
    `in_process` saves the helper processes in which the leader of a host decodes and folds, at the price of this
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
        in_process: bool = False,
        progress: Progress | None = None,
    ) -> None:
        sources = Sources(source_dir=Path(source_dir), base_dir=Path(base_dir))
        live = LiveModel(
            model,
            load_weights=load_weights,
            twin=twin,
            layout=layout,
            derived=derived,
            sources=sources,
            local_checkpoint_dir=Path(local_checkpoint_dir),
            choose_memory=lambda params: choose_memory(params, want=device)[0],
        )

        def open_host() -> Host:
            return Host(
                Path(local_checkpoint_dir),
                sources,
                pre_read_hook=pre_read_hook,
                timeout_s=timeout,
                visibility_timeout_s=visibility_timeout,
                workers=workers or min(8, os.cpu_count() or 1),
                in_process=in_process,
            )

        group_of_ours = open_group(group, local_checkpoint_dir=local_checkpoint_dir, timeout_s=timeout)
        self._rank = Rank(
            team=Team(group_of_ours, timeout_s=timeout),
            live=live,
            sources=sources,
            local_checkpoint_dir=Path(local_checkpoint_dir),
            open_host=open_host,
            reload=live.load if reload is None else reload,
            staging_bytes=staging_bytes,
            verifies_after=verify == "before+after",
            progress=progress,
        )
        self.report: SyncReport | None = None
        self._expires_after = expires_after
        self._prepared: Prepared | None = None
        self._doubtful: Prepared | None = None
        self._invalid: str | None = None
        self._holds_are_stale = False
        self._expiry: threading.Timer | None = None
        self._turn = threading.RLock()
        self._closed = False
        try:
            self._enter("attach", None)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """What is live and verified; None when that is not known."""
        return None if self._invalid is not None else self._rank.live.version

    @property
    def prepared(self) -> Prepared | None:
        """What waits for its commit."""
        return self._prepared

    @property
    def durable_version(self) -> int | None:
        """The newest version that this host can rebuild after a crash. Only its leader knows."""
        return require_leader(self._rank.host, self._rank.team.group.rank).mirror.status().durable_version

    @property
    def in_doubt(self) -> str | None:
        """Why this rank does not know what was decided. It must serve nothing until its next call has resolved it."""
        if self._doubtful is None:
            return None
        return f"whether version {self._doubtful.version} was committed is not known here"

    @property
    def ready(self) -> bool:
        """Whether this rank may serve, and what it serves is known."""
        return self._doubtful is None and self.version is not None

    def pull(self, target: int) -> SyncReport:
        """`prepare`, then `commit`."""
        with self._turn:
            return self.commit(self.prepare(target))

    def prepare(self, target: int) -> Prepared:
        """Verify `target` on every rank and make it durable on every host; live weights are not written.

        A collective. The same target again returns the pending result; another one drops it. 0 makes the local
        checkpoint the base again. On any error nothing has changed, and every rank raises: its own error where it
        failed, PeerFailedError elsewhere.
        """
        target = _checked(target)
        with self._turn:
            self._enter("prepare", target)
            if self._prepared is not None:
                return self._prepared
            try:
                prepared = prepare_base(self._rank) if target == 0 else prepare_version(self._rank, target)
            except BaseException:
                if self._rank.host is not None:
                    self._rank.host.drop(target)
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
            is_waiting = prepared is not None and prepared is self._prepared
            self._enter("commit", prepared.version if is_waiting else None)
            self._prepared = None
            self._cancel_expiry()
            with clock.stage("commit"):
                self._commit(prepared, clock)
            clock.seconds["commit"] -= clock.seconds["fingerprint"] + clock.seconds["fold"]
            before = prepared.report.seconds
            seconds = {name: before.get(name, 0.0) + more for name, more in clock.seconds.items()}
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
            self._enter("flush", None)
            limit = self._rank.team.timeout_s if timeout is None else timeout
            self._rank.team.step("folding the local checkpoint", lambda: self._rank.flush(limit), "flush")

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is prepared, and end the threads, the helpers and the group. What is live and durable stays."""
        with self._turn:
            self._closed = True
            try:
                self._drop_prepared()
                if self._rank.host is not None:
                    self._rank.host.close()
            finally:
                self._rank.host = None
                self._rank.team.group.close()

    def _commit(self, prepared: Prepared, clock: Clock) -> None:
        if prepared.report.commit_path == "in place":
            try:
                commit_in_place(self._rank, prepared, clock)
            except InDoubtError:
                self._doubtful = prepared
                raise
            except BaseException:
                self._holds_are_stale = True
                raise
        elif prepared.report.commit_path == "reload":
            commit_by_reload(self._rank, prepared, clock)
        self._settle(prepared)

    def _settle(self, prepared: Prepared) -> None:
        """It is live. After a reload, attaching has found out what that is."""
        if prepared.report.commit_path != "reload":
            self._rank.live.applied = prepared.applied
        prepared.close()
        self._rank.let_go()

    def _enter(self, what: str, target: int | None) -> None:
        """Begin a transaction in which all ranks do the same, from the same state.

        Decisions that were missed are resolved first. Where a rank is new in the group, all attach before anything
        else. What ranks do not agree on (what is live, what is prepared) none of them has.
        """
        if self._closed:
            raise RefusedError("this WeightSync was closed")
        self._resolve_doubt()
        while True:
            self._rank.team.begin()
            waiting = None if self._prepared is None else self._prepared.version
            mine = [what, target, waiting, self.version, self._invalid]
            told = self._rank.team.gather(mine)
            if self._holds_are_stale:  # all have come again
                self._holds_are_stale = False
                self._rank.let_go()
            if all(each[0] != "attach" for each in told):
                break
            self._drop_prepared()
            self._rank.attach()
            self._invalid = None
            if what == "attach":
                return
        self._settle_differences(told)
        if any(each[:2] != mine[:2] for each in told):
            asked = {rank: f"{each[0]} {each[1]}" for rank, each in enumerate(told)}
            raise RefusedError("ranks were asked for different things, or hold different versions", found=asked)
        if what == "commit" and (target is None or self._prepared is None):
            raise RefusedError("what is to be committed is no longer prepared", version=target)
        if self._prepared is not None and (what == "flush" or self._prepared.version not in (target, None)):
            self._drop_prepared()

    def _settle_differences(self, told: Sequence[Sequence[Any]]) -> None:
        if any(each[2] != told[0][2] for each in told):
            self._drop_prepared()
        if any(each[3] != told[0][3] or each[4] is not None for each in told):
            self._drop_prepared()
            self._rank.live.forget()
        self._invalid = None

    def _resolve_doubt(self) -> None:
        """Learn a decision that was missed, and act on it."""
        group = self._rank.team.group
        if group.in_doubt is None:
            return
        decision = group.resolve(*group.in_doubt, timeout_s=self._rank.team.timeout_s)
        prepared, self._doubtful = self._doubtful, None
        if prepared is None:
            return  # the decision was on a step of prepare, of which nothing is left
        if decision.ok:
            self._settle(prepared)
        else:
            roll_back(self._rank, prepared)
            self._holds_are_stale = True

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        self._cancel_expiry()
        if prepared is not None:
            prepared.close()
            self._rank.let_go()

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


def _checked(target: object) -> int:
    """A version number. Raises RefusedError before any rank waits for another."""
    try:
        number = -1 if isinstance(target, bool) else operator.index(target)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < MAX_VERSION:
        raise RefusedError("a target is a version number", expected=f"0 to {MAX_VERSION - 1}", found=repr(target)[:80])
    return number
