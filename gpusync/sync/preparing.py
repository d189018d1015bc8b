"""Preparing a version on all ranks: fetched and decoded once per host, verified by all, made durable on every host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpusync.beside import beside_serving
from gpusync.errors import MirrorError
from gpusync.plan import Applied, Plan
from gpusync.store.compact import StepFiles
from gpusync.store.decoding import COMPACT_FILE, UPDATES_FILE
from gpusync.store.load import dense_bytes
from gpusync.store.tensor_update import TensorUpdate, read_updates
from gpusync.store.update import PreparedUpdate
from gpusync.sync.host import Fetched
from gpusync.sync.live import LazyBase
from gpusync.sync.rank import Rank
from gpusync.sync.report import Clock, CommitPath, Prepared, SyncReport

BASE_WAIT_S = 60.0


@beside_serving()
def prepare_version(rank: Rank, target: int) -> Prepared:
    """A collective. Where it raises, nothing has changed but that a leader may hold things: `Host.drop` them."""
    clock, team, live = Clock(), rank.team, rank.live
    fetched = _fetch(rank, target, clock)
    base = LazyBase(live, timeout_s=min(team.timeout_s, BASE_WAIT_S))
    files = None if fetched.files is None else StepFiles(Path(fetched.files) / COMPACT_FILE)
    try:
        updates, mine = team.step("reading what was fetched", lambda: _look(rank, fetched, base), "look")
        path, reason = _choose_path(rank, fetched, mine)
        update = None
        if path == "in place" and files is not None:
            update = _verify(rank, updates, files, base, clock)
            team.step("verifying what no rank holds", lambda: _verify_rest(rank, base), "rest")
        team.step("making the version durable", lambda: _accept(rank, target), "accept")
        if path == "reload":
            with clock.stage("fold"):  # which verifies it, for ranks that will not
                team.step("folding the local checkpoint", lambda: rank.flush(team.timeout_s), "fold")
    except BaseException:
        base.close()
        if files is not None:
            files.close()
        raise
    report = SyncReport(
        version=target,
        version_before=live.version,
        chain=fetched.plan.chain,
        commit_path=path,
        reason=reason,
        applier=live.memory.backend[0],
        decoder=live.memory.backend[1],
        verified="unverified-source" if fetched.is_unverified else "checksums",
        tensors_changed=len(updates),
        wire_bytes=fetched.stats.wire_bytes,
        compact_bytes=fetched.stats.compact_bytes,
        peak_staging_bytes=live.memory.peak_bytes,
        bytes_by_class=live.layout.bytes_by_class(),
        seconds=clock.seconds,
    )
    if update is not None:
        report = replace(
            report,
            repaired=tuple(update.repaired),
            touched_bytes=update.touched_bytes,
            exchanged_bytes=update.traffic.nbytes,
            streamed_bytes=update.streamed_bytes,
        )
    applied = fetched.applied_after(live.applied)
    return Prepared(version=target, plan=fetched.plan, report=report, applied=applied, update=update, base=base)


def prepare_base(rank: Rank) -> Prepared:
    """The local checkpoint becomes the base; what is live and is something else is unknown from then on."""
    clock, before = Clock(), rank.live.version
    rank.team.step("resetting the local checkpoint", lambda: None if rank.host is None else rank.host.reset(), "reset")
    if before != 0:
        rank.live.forget()
    plan = Plan(target=0, seed="base", seed_version=0, chain=(), reason="version 0 is the engine's own base")
    report = SyncReport(
        version=0,
        version_before=before,
        chain=(),
        commit_path="nothing" if before == 0 else "reload",
        reason="live is the base already" if before == 0 else plan.reason,
        applier=rank.live.memory.backend[0],
        bytes_by_class=rank.live.layout.bytes_by_class(),
        seconds=clock.seconds,
    )
    return Prepared(version=0, plan=plan, report=report, applied=Applied(version=0))


def _fetch(rank: Rank, target: int, clock: Clock) -> Fetched:
    """Every leader fetches; returns what this host's own has found. All hosts must have found the same."""
    team, live = rank.team, rank.live

    def fetch() -> Fetched | None:
        return None if rank.host is None else rank.host.fetch(target, live.applied, live.layout)

    mine = team.step("fetching", fetch, "fetch")
    told = team.gather(None if mine is None else mine.as_told())
    found = {leader: Fetched.from_told(told[leader]) for leader in team.group.leaders}
    fetched = found[team.group.leader]
    for stage, seconds in fetched.seconds.items():
        clock.add(stage, seconds)
    first = found[team.group.leaders[0]]
    if any(each.digests != first.digests for each in found.values()):
        raise MirrorError("the hosts see different streams", version=target, path=rank.sources.source_dir)
    # Where one host's files are elsewhere, and nothing was decoded for it, nobody commits in place.
    if all(each.outcome == first.outcome for each in found.values()):
        return fetched
    reason = next((each.why_reload for each in found.values() if each.why_reload), "the hosts' files differ")
    return replace(fetched, files=None, why_reload=reason)


def _choose_path(rank: Rank, fetched: Fetched, mine: str | None) -> tuple[CommitPath, str]:
    """How the commit will be made, and why; the same on all ranks. `mine`: why this one cannot make it in place."""
    told = rank.team.gather(mine)
    reason = next((each for each in told if each is not None), None)
    if reason is not None:
        return "reload", reason
    return ("nothing" if fetched.plan.is_nothing else "in place"), fetched.plan.reason


def _look(rank: Rank, fetched: Fetched, base: LazyBase) -> tuple[dict[str, TensorUpdate], str | None]:
    """The steps of all changed tensors, and why this rank cannot bring its weights there in place."""
    if fetched.files is None:
        return {}, fetched.why_reload
    updates = read_updates(Path(fetched.files) / UPDATES_FILE)
    return updates, _why_reload(rank, updates, base)


def _why_reload(rank: Rank, updates: Mapping[str, TensorUpdate], base: LazyBase) -> str | None:
    store, version = rank.live.store, rank.live.version
    opaque = store.opaque_among(updates)
    if opaque:
        name, why = next(iter(opaque.items()))
        return f"{len(opaque)} changed tensors cannot be patched in place, `{name}` among them: {why}"
    dense = sum(dense_bytes(step, update.nbytes) for update in updates.values() for step in update.steps)
    if dense > store.dense_bytes and base.reader is None:
        return f"{dense} dense bytes could not be rolled back: the files do not hold version {version}"
    return None


def _verify_rest(rank: Rank, base: LazyBase) -> None:
    if rank.host is not None and not rank.live.tensors.keys() <= rank.live.store.held_by_any.keys():
        rank.host.verify_rest(rank.live.store.held_by_any, base.reader)


def _accept(rank: Rank, target: int) -> None:
    if rank.host is not None:
        rank.host.accept(target)


def _verify(
    rank: Rank, updates: Mapping[str, TensorUpdate], files: StepFiles, base: LazyBase, clock: Clock
) -> PreparedUpdate:
    team, live = rank.team, rank.live
    live.memory.reset_peak()
    room = min(team.gather(team.step("making room for scratch", lambda: live.store.reserve(updates), "room", clock)))

    def prepare() -> PreparedUpdate:
        return live.store.prepare(updates, files, room=room, base=base, progress=rank.progress)

    update = team.step("verifying", prepare, "verify", clock)
    for stage, seconds in update.watch.seconds.items():
        if stage != "total":
            clock.add(stage, seconds)
    return update
