"""The mirror as an engine uses it: versions are received and accepted at once, and folded into the files behind.

Everything that matters is on disk, so several processes may each have a Mirror of one directory: `inbox.json` says what
is accepted, and whoever gets the directory's lock folds it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpusync.errors import MirrorError, StreamError, VersionMissingError
from gpusync.hooks import Hook, load_hook, run_hook
from gpusync.mirror import inbox as boxes
from gpusync.mirror import io, state
from gpusync.mirror.behind import FoldsBehind
from gpusync.mirror.change import check_payloads
from gpusync.mirror.inbox import Entry, Inbox, inbox_lock, read_inbox
from gpusync.mirror.local import open_local_directory, resolve_local_directory
from gpusync.mirror.lock import local_lock
from gpusync.mirror.look import Sources, as_checkpoint, plan_ahead, read_chain, read_published
from gpusync.mirror.pending import KEEP_BYTES, KEEP_VERSIONS, FoldJob
from gpusync.mirror.receive import receive_full
from gpusync.mirror.session import Session, lowest_held
from gpusync.plan import Applied, Plan
from gpusync.stream import Checkpoint, OpenFiles, PublishedVersion, read_checkpoint, read_version, wait_until_visible

LOCK_TIMEOUT_S = 600.0
INBOX_BYTES = 64 * 10**9
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """`durable_version`: the newest version that survives a crash now; `folded_version`: what the tensor files hold
    (None while they are being written). `lag_*` count what is accepted and not folded. `held`: the lowest version that
    a live session keeps out of the files. `last_error`: why the last fold failed, while there is something to fold."""

    durable_version: int | None
    folded_version: int | None
    lag_versions: int
    lag_bytes: int
    held: int | None
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Received versions, and what was durable when the way to them was planned."""

    applied: Applied
    plan: Plan
    entries: Sequence[Entry]


class Mirror:
    """A host-local checkpoint, written behind.

    `receive(version)` copies what leads to a version into the inbox; `accept(version)` makes it durable: from then on
    it survives a crash at any instruction; `discard(version)` drops it. Accepted versions are folded by a thread of
    this object, several in one pass, but none that a live session holds. An error of that thread is raised by the next
    call of any method but `status`, and the fold is tried again after that.

    `inbox_bytes` bounds what is accepted and not folded: `receive` waits for room. `keep_versions` and `keep_bytes`
    bound the payloads kept after their fold. `in_process=False` gives the folding to a helper process, which ends with
    this one: a fold is mostly Python where tensors are many and small.
    """

    def __init__(
        self,
        local_checkpoint_dir: str | os.PathLike[str],
        *,
        base_dir: str | os.PathLike[str],
        source_dir: str | os.PathLike[str],
        pre_read_hook: Hook | str | None = None,
        inbox_bytes: int = INBOX_BYTES,
        keep_versions: int = KEEP_VERSIONS,
        keep_bytes: int = KEEP_BYTES,
        lock_timeout: float = LOCK_TIMEOUT_S,
        workers: int | None = None,
        in_process: bool = True,
    ) -> None:
        self._sources = Sources(source_dir=Path(source_dir), base_dir=Path(base_dir))
        self._hook = load_hook(pre_read_hook, what="pre-read hook")
        self._inbox_bytes, self._lock_timeout = inbox_bytes, lock_timeout
        self._workers = workers or min(8, os.cpu_count() or 1)
        self.path = resolve_local_directory(
            Path(local_checkpoint_dir),
            apart_from={"base directory": self._sources.base_dir, "source directory": self._sources.source_dir},
        )
        self._control = self.path / state.CONTROL_DIRECTORY
        with io.explained("the mirror cannot be opened", self.path), local_lock(self._control, timeout_s=lock_timeout):
            open_local_directory(self.path, workers=self._workers)
            # an inbox.json that a killed process had renamed and not synced is about to be relied on
            io.fsync_directory(self._control)
            with inbox_lock(self._control):
                boxes.sweep(self._control)
            self._session = Session(self._control)
        self._candidates: dict[int, _Candidate] = {}
        self._scratch: set[str] = set()
        self._receiving = threading.Lock()
        self._closed = False
        job = FoldJob(
            path=self.path,
            sources=self._sources,
            workers=self._workers,
            keep_versions=keep_versions,
            keep_bytes=keep_bytes,
            lock_timeout=lock_timeout,
        )
        self._folds = FoldsBehind(job, in_process=in_process)

    def receive(self, version: int, *, visibility_timeout: float = 0.0) -> Plan:
        """Copy the versions that lead to `version` into the inbox, synced. They are candidates until `accept`.

        Raises as `pull` does for a stream that is wrong or not there, and MirrorError when the inbox has no room in
        time. After an error nothing of it is left.
        """
        self._raise_error()
        if version < 1:
            raise MirrorError("version 0 is the base: only a pull brings the files back to it", version=version)
        with io.explained("a version cannot be received", self.path):
            if version in self._candidates:
                return self._candidates[version].plan
            applied, plan, versions = wait_until_visible(
                lambda: self._look(version), refresh=lambda: self._refresh(version), timeout_s=visibility_timeout
            )
            self._wait_for_room(sum(each.wire_bytes for each in versions))
            with self._receiving:
                return self._copy_all(version, applied, plan, versions)

    def accept(self, version: int) -> None:
        """Make a received version durable. When this returns, the mirror will hold it whatever happens.

        Raises MirrorError when `version` was not received, or when another process has meanwhile led the directory
        elsewhere; receive it again then.
        """
        self._raise_error()
        with io.explained("a version cannot be accepted", self.path), self._receiving:
            candidate = self._candidates.pop(version, None)
            if candidate is None:
                raise MirrorError("a version must be received before it is accepted", path=self.path, version=version)
            try:
                with inbox_lock(self._control):
                    accepted = self._try_accept(candidate, files_are_still=False)
                if not accepted:
                    with local_lock(self._control, timeout_s=self._lock_timeout), inbox_lock(self._control):
                        self._try_accept(candidate, files_are_still=True)
            finally:
                self._sweep()
        self._folds.wake()

    def has_candidate(self, version: int) -> bool:
        """Whether `version` was received here and waits for `accept` or `discard`."""
        return version in self._candidates

    def discard(self, version: int) -> None:
        """Drop a candidate; one that is not there is fine. What was accepted stays."""
        with io.explained("a candidate cannot be dropped", self.path), self._receiving:
            if self._candidates.pop(version, None) is not None:
                self._sweep()

    def find_received(self, version: int, digest: str) -> Entry | None:
        """The copy of a published version that is in the inbox, received, accepted or kept; None when none is."""
        inbox = read_inbox(self._control)
        received = [entry for candidate in self._candidates.values() for entry in candidate.entries]
        for entry in (*received, *inbox.pending, *inbox.folded):
            if entry.identity == (version, digest):
                return entry
        return None

    @property
    def control(self) -> Path:
        """The control directory, where entries of the inbox lie."""
        return self._control

    def make_scratch(self) -> Path:
        """A new directory on this host, for what lasts no longer than this process."""
        path = boxes.make_scratch(self._control, session=self._session.name)
        self._scratch.add(path.name)
        return path

    def drop_scratch(self, path: Path) -> None:
        """It is removed when versions are next received here, or at the end: not now, in somebody's pause."""
        self._scratch.discard(path.name)

    def hold(self, version: int) -> None:
        """Keep `version` and later ones out of the files, in every process, until `release` or this process's end.

        A fold of them that is under way is waited for: afterwards the files hold them or will not.
        """
        try:
            self._session.hold(version)
            if any(entry.version >= version for entry in read_inbox(self._control).pending):
                with local_lock(self._control, timeout_s=self._lock_timeout):
                    pass  # whoever was folding has ended
        except BaseException:
            self._session.release(version)
            raise

    def release(self, version: int) -> None:
        """Undo one `hold`."""
        self._session.release(version)
        self._folds.wake()

    def flush(self, timeout: float) -> None:
        """Wait until everything accepted is folded. MirrorError, naming what is in the way, after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._folds.wake()
        while (inbox := read_inbox(self._control)).pending:
            self._raise_error()
            if time.monotonic() > deadline:
                raise self._stuck("the mirror was not flushed in time", inbox)
            time.sleep(POLL_S)
        self._raise_error()

    def status(self) -> MirrorStatus:
        inbox, known = read_inbox(self._control), state.read_state(self._control)
        held = lowest_held(self._control)
        return MirrorStatus(
            durable_version=inbox.applied(known).version,
            folded_version=None if known is None else known.version,
            lag_versions=len(inbox.pending),
            lag_bytes=inbox.pending_bytes,
            held=None if held is None else held.held,
            last_error=self._folds.last_error if inbox.pending else None,
        )

    def close(self) -> None:
        """Stop the thread after the fold it is at. What is accepted stays accepted; candidates are dropped."""
        self._closed = True
        self._folds.close()
        self._session.close()
        self._candidates.clear()
        self._scratch.clear()
        self._sweep()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy_all(self, version: int, applied: Applied, plan: Plan, versions: Sequence[PublishedVersion]) -> Plan:
        if version in self._candidates:
            return self._candidates[version].plan
        entries: list[Entry] = []
        try:
            with OpenFiles() as files:
                for each in versions:
                    entries.append(self._copy(each, files))
        except BaseException:
            self._sweep()
            raise
        self._candidates[version] = _Candidate(applied=applied, plan=plan, entries=tuple(entries))
        return plan

    def _look(self, target: int) -> tuple[Applied, Plan, list[PublishedVersion]]:
        """What is durable, the plan from there, and the versions to copy for it, validated."""
        inbox = read_inbox(self._control)
        applied = self._applied(inbox)
        plan, _ = plan_ahead(self._sources, applied, target=target)
        if plan.seed == "full":
            full = read_published(self._sources, plan.seed_version)
            return applied, plan, [full, *read_chain(self._sources, plan.chain, as_checkpoint(full))]
        start = self._sources.read_base() if plan.seed == "base" else self._store_checkpoint(inbox)
        return applied, plan, read_chain(self._sources, plan.chain, start)

    def _store_checkpoint(self, inbox: Inbox) -> Checkpoint:
        """The tensors of what is durable: names and sizes. Those of the files, unless what is pending replaces them."""
        try:
            return self._read_durable(inbox)
        except (VersionMissingError, StreamError):
            # A fold may be moving these very files: his lock tells.
            with local_lock(self._control, timeout_s=self._lock_timeout):
                return self._read_durable(read_inbox(self._control))

    def _read_durable(self, inbox: Inbox) -> Checkpoint:
        full = [entry for entry in inbox.pending if entry.kind == "full"]
        if full:
            return read_checkpoint(full[-1].path(self._control))
        return self._sources.read_base() if inbox.seed == "base" else read_checkpoint(self.path, follow_links=True)

    def _applied(self, inbox: Inbox) -> Applied:
        known = state.read_state(self._control)
        if known is None and not inbox.pending:
            # The files are being written by somebody, or hold nothing: his lock tells which.
            with local_lock(self._control, timeout_s=self._lock_timeout):
                known = state.read_state(self._control)
        return inbox.applied(known)

    def _try_accept(self, candidate: _Candidate, *, files_are_still: bool) -> bool:
        """Accept, unless somebody else is at the files and what they hold cannot be told (False). The inbox's lock is
        held; the directory's must not be waited for under it, since a fold takes them the other way round."""
        inbox, known = read_inbox(self._control), state.read_state(self._control)
        if known is None and not inbox.pending and not files_are_still:
            return False
        boxes.write_inbox(self._control, _with_accepted(inbox, candidate, inbox.applied(known)))
        return True

    def _refresh(self, version: int) -> None:
        run_hook(self._hook, os.fspath(self._sources.source_dir), version, what="the pre-read hook")

    def _copy(self, version: PublishedVersion, files: OpenFiles) -> Entry:
        if version.is_delta:
            entry = boxes.copy_delta(version, control=self._control, session=self._session.name, files=files)
            check_payloads(read_version(entry.directory(self._control), entry.version))
            return entry
        return receive_full(
            version,
            base=self._sources.read_base(),
            control=self._control,
            session=self._session.name,
            files=files,
            workers=self._workers,
        )

    def _wait_for_room(self, nbytes: int) -> None:
        deadline = time.monotonic() + self._lock_timeout
        while (inbox := read_inbox(self._control)).pending and inbox.pending_bytes + nbytes > self._inbox_bytes:
            self._raise_error()
            if time.monotonic() > deadline:
                raise self._stuck(f"the inbox has no room for {nbytes} bytes", inbox)
            self._folds.wake()
            time.sleep(POLL_S)

    def _stuck(self, what: str, inbox: Inbox) -> MirrorError:
        holder = lowest_held(self._control)
        why = "" if holder is None else f": process {holder.pid} on {holder.host} holds version {holder.held}"
        return MirrorError(
            what + why,
            path=self.path,
            found=f"{len(inbox.pending)} versions, {inbox.pending_bytes} bytes that are not folded",
        )

    def _sweep(self) -> None:
        """Remove what neither the inbox nor a candidate of ours, nor any other live session, needs."""
        named = {entry.place for candidate in self._candidates.values() for entry in candidate.entries} | self._scratch
        with inbox_lock(self._control):
            boxes.sweep(self._control, own=self._session.name, own_places=named)

    def _raise_error(self) -> None:
        if self._closed:
            raise MirrorError("the mirror was closed", path=self.path)
        self._folds.raise_error()


def _with_accepted(inbox: Inbox, candidate: _Candidate, applied: Applied) -> Inbox:
    """The inbox with a candidate accepted. What another process has accepted since is not undone, nor added twice."""
    if applied == candidate.applied and candidate.plan.reseeds:
        seed: Literal["store", "base"] = "base" if candidate.plan.seed == "base" else "store"
        return replace(inbox, seed=seed, pending=candidate.entries)
    rest = [entry for entry in candidate.entries if applied.digests.get(entry.version) != entry.digest]
    first = rest[0] if rest else None
    continues = first is None or first.base_version == applied.version
    if first is not None and first.kind == "full":
        # a full version of another stream, or an older one, may be what somebody else has just led away from
        continues = first.stream_id == applied.stream_id and first.version > (applied.version or 0)
    if not continues:
        raise MirrorError(
            "the directory was led elsewhere since the version was received; receive it again",
            version=candidate.plan.target,
            expected=f"version {candidate.applied.version}",
            found=f"version {applied.version}",
        )
    return replace(inbox, pending=(*inbox.pending, *rest))
