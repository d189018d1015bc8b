"""Folding what the inbox has accepted into the files: several pending versions in one pass.

The directory's lock is held throughout. Used behind, by a mirror, and in the foreground by the disk path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from gpusync.errors import ChainError, DigestMismatchError, MirrorError, StreamError, VersionMissingError
from gpusync.mirror import inbox as boxes
from gpusync.mirror import journal
from gpusync.mirror.inbox import Entry, Inbox, inbox_lock, read_inbox, stored_inbox
from gpusync.mirror.local import LocalDirectory, examine_local_directory, find_own_fault, open_local_directory
from gpusync.mirror.lock import local_lock
from gpusync.mirror.look import Sources, look
from gpusync.mirror.move import Move, carry_out
from gpusync.mirror.receive import installation
from gpusync.mirror.session import SessionInfo, lowest_held
from gpusync.mirror.state import CONTROL_DIRECTORY, read_state
from gpusync.plan import Plan
from gpusync.report import Stopwatch
from gpusync.stream import Checkpoint, read_version

KEEP_VERSIONS = 2
KEEP_BYTES = 4 * 10**9
POLL_S = 0.05


def fold_pending(
    local: LocalDirectory,
    *,
    sources: Sources,
    workers: int,
    keep_versions: int = KEEP_VERSIONS,
    keep_bytes: int = KEEP_BYTES,
) -> LocalDirectory:
    """Fold the accepted versions that come before the first one that a live session holds.

    Returns the directory as it is then. Should the files turn out to be damaged, they are seeded anew from `sources`,
    up to the same version. Accepted versions that are wrong in themselves are dropped, and what was wrong is raised:
    they could never be folded. Payloads of the newest `keep_versions` folded versions stay, within `keep_bytes`.
    """
    while True:
        inbox, holder = read_inbox(local.control), lowest_held(local.control)
        ready = list(takewhile(partial(_is_free, holder), inbox.pending))
        if not ready:
            break
        try:
            _fold(local, inbox, ready, sources=sources, workers=workers)
        except (StreamError, DigestMismatchError, VersionMissingError):
            if _still_pending(local, ready):
                boxes.drop_pending(local.control, up_to=ready[-1].version)
                raise
            # accepting a full version has made these irrelevant meanwhile, and their payloads are gone
        local = examine_local_directory(local.path, known=read_state(local.control), workers=workers)
    with inbox_lock(local.control):
        now = read_inbox(local.control)
        kept = boxes.retain(now, versions=keep_versions, nbytes=keep_bytes)
        if kept != stored_inbox(local.control):
            boxes.write_inbox(local.control, kept)
        boxes.sweep(local.control)
    return local


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldJob:
    """`fold_pending` of the local directory `path`, under its lock: for the thread behind, or for a helper process."""

    path: Path
    sources: Sources
    workers: int
    keep_versions: int
    keep_bytes: int
    lock_timeout: float

    def run(self) -> None:
        with local_lock(self.path / CONTROL_DIRECTORY, timeout_s=self.lock_timeout):
            fold_pending(
                open_local_directory(self.path, workers=self.workers),
                sources=self.sources,
                workers=self.workers,
                keep_versions=self.keep_versions,
                keep_bytes=self.keep_bytes,
            )


def wait_for_holders(path: Path, *, timeout_s: float) -> None:
    """Wait until no live session holds a version of the directory `path`; MirrorError, naming it, after that."""
    deadline = time.monotonic() + timeout_s
    while (holder := lowest_held(path / CONTROL_DIRECTORY)) is not None:
        if time.monotonic() > deadline:
            raise MirrorError(
                f"process {holder.pid} on {holder.host} holds a version prepared: the files must not change under it",
                path=path,
                version=holder.held,
                expected=f"its release within {timeout_s:g} s",
            )
        time.sleep(POLL_S)


def _fold(local: LocalDirectory, inbox: Inbox, ready: list[Entry], *, sources: Sources, workers: int) -> None:
    full = [number for number, entry in enumerate(ready) if entry.kind == "full"]
    if full:
        # What precedes a full version does not matter; what follows it is folded in the next round.
        decided = installation(ready[full[-1]], local)
        with inbox_lock(local.control):  # a sweep must find the version accepted, or the move decided
            if not _still_pending(local, [ready[full[-1]]]):
                return
            journal.commit(local.path, decided)
        journal.finish(local.path, decided, workers=workers)
        return
    continues = inbox.seed == "store"
    if continues and (local.distrust is not None or not _builds_on(local, ready[0])):
        damage = local.distrust or "the files are not at the version that the accepted ones build on"
        _seed_anew(local, ready[-1].version, damage, sources=sources, workers=workers)
        return
    try:
        move = _move(local, ready, sources=sources, seed="store" if continues else "base")
        carry_out(local, move, workers=workers, watch=Stopwatch())
    except DigestMismatchError as error:
        found = find_own_fault(local, error)
        if found is None:
            raise
        _seed_anew(local, ready[-1].version, found, sources=sources, workers=workers)


def _is_free(holder: SessionInfo | None, entry: Entry) -> bool:
    return holder is None or holder.held is None or entry.version < holder.held


def _still_pending(local: LocalDirectory, entries: Sequence[Entry]) -> bool:
    pending = stored_inbox(local.control).pending
    return all(entry in pending for entry in entries)


def _builds_on(local: LocalDirectory, entry: Entry) -> bool:
    return local.state is not None and entry.base_version == local.state.version


def _move(local: LocalDirectory, ready: list[Entry], *, sources: Sources, seed: str) -> Move:
    base: Checkpoint | None = sources.read_base() if seed == "base" else None
    start = base or local.checkpoint
    if start is None or (local.state is None and seed == "store"):
        raise ChainError("accepted versions have nothing to build on", path=local.path, version=ready[0].version)
    versions = [read_version(entry.directory(local.control), entry.version) for entry in ready]
    plan = Plan(
        target=ready[-1].version,
        seed="base" if seed == "base" else "store",
        seed_version=0 if local.state is None or seed == "base" else local.state.version,
        chain=tuple(entry.version for entry in ready),
        reason="accepted versions",
    )
    # the identity is that of the published version, which a copy alone cannot tell
    indexes = {
        entry.version: replace(version.index, digest=entry.digest)
        for entry, version in zip(ready, versions, strict=True)
    }
    return Move(plan=plan, start=start, versions=versions, indexes=indexes, base=base)


def _seed_anew(local: LocalDirectory, target: int, damage: str, *, sources: Sources, workers: int) -> None:
    """The files cannot be continued: take the whole way to `target` from the stream."""
    torn = replace(local, distrust=damage)
    carry_out(torn, look(sources, torn, target=target), workers=workers, watch=Stopwatch())
