"""The inbox: payloads of versions that a local directory has received and its files do not hold yet.

    inbox/{place}/weight_v000042/   a copy of a delta version, or a full version ready to be put in place
    inbox.json                      what is accepted, in order, and which folded versions are kept

A version is a *candidate* while only its directory is there, *accepted* once `inbox.json` names it (that write is the
promise that it survives), *folded* once the tensor files hold it. `{place}` is unique for each copy, so that nothing is
ever written over. What `inbox.json` does not name, and no live session is copying, is removed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import filelock
import numpy as np

from gpusync.errors import JournalError, StreamError
from gpusync.mirror import io
from gpusync.mirror.journal import JOURNAL_FILE, read_journal
from gpusync.mirror.session import live_sessions
from gpusync.mirror.state import DAMAGE, MirrorState, plain_name, read_state
from gpusync.plan import Applied
from gpusync.stream import INDEX_NAME, OpenFiles, PublishedVersion, SourceFile, VersionIndex, version_dir_name

INBOX_DIRECTORY = "inbox"
INBOX_FILE = "inbox.json"
COPY_BYTES = 4 * 2**20
INBOX_LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One version in the inbox. `place` names its directory, `digest` is that of the published index."""

    version: int
    base_version: int | None
    kind: Literal["delta", "full"]
    digest: str
    stream_id: str | None
    nbytes: int
    place: str

    @property
    def identity(self) -> tuple[int, str]:
        return self.version, self.digest

    def directory(self, control: Path) -> Path:
        """The stand-in for a `source_dir` that holds this version alone."""
        return control / INBOX_DIRECTORY / self.place

    def path(self, control: Path) -> Path:
        return self.directory(control) / version_dir_name(self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """What is accepted: `pending` in the order of their fold, upon `seed`; `folded` are kept for those who lag.

    `seed` is "store" when the first pending delta builds on what the files hold, "base" when it builds on the engine's
    own checkpoint. A full version among them makes what comes before it irrelevant.
    """

    seed: Literal["store", "base"] = "store"
    pending: Sequence[Entry] = ()
    folded: Sequence[Entry] = ()

    @property
    def pending_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.pending)

    def applied(self, state: MirrorState | None) -> Applied:
        """What the directory will hold once everything accepted is folded: where the next version is planned from."""
        digests = {} if state is None or self.reseeds else dict(state.index_digests)
        if not self.pending:
            if state is None:
                return Applied()
            return Applied(version=state.version, stream_id=state.stream_id, digests=digests)
        newest = self.pending[-1]
        digests |= {entry.version: entry.digest for entry in self.pending}
        stream_id = newest.stream_id or (None if state is None or self.reseeds else state.stream_id)
        return Applied(version=newest.version, stream_id=stream_id, digests=digests)

    @property
    def reseeds(self) -> bool:
        return self.seed == "base" or any(entry.kind == "full" for entry in self.pending)


def read_inbox(control: Path) -> Inbox:
    """The inbox as it is: without the pending versions that the files hold already (a fold ended without telling)."""
    inbox, state = stored_inbox(control), read_state(control)
    return inbox if state is None else after_fold(inbox, state)


def stored_inbox(control: Path) -> Inbox:
    """What `inbox.json` says; nothing is accepted when it is not there."""
    path = control / INBOX_FILE
    try:
        told = json.loads(path.read_bytes())
        return Inbox(
            seed=told["seed"],
            pending=tuple(_entry(entry) for entry in told["pending"]),
            folded=tuple(_entry(entry) for entry in told["folded"]),
        )
    except FileNotFoundError:
        return Inbox()
    except (OSError, *DAMAGE) as error:
        raise JournalError(f"the inbox cannot be read ({error})", path=path) from error


def _entry(told: dict[str, Any]) -> Entry:
    entry = Entry(**told)
    plain_name(entry.place)
    return entry


def after_fold(inbox: Inbox, state: MirrorState) -> Inbox:
    """The inbox when the files hold `state`: pending versions that they went through have become folded ones.

    Deltas upon the files that are no longer newer than the files lead nowhere (another way led further): dropped.
    """
    done = 0
    for number, entry in enumerate(inbox.pending, start=1):
        passed = entry.version <= state.version and state.index_digests.get(entry.version) == entry.digest
        if passed or (not inbox.reseeds and entry.version <= state.version):
            done = number
    if not done:
        return inbox
    kept = [entry for entry in inbox.pending[:done] if entry.kind == "delta"]
    return replace(inbox, seed="store", pending=inbox.pending[done:], folded=(*inbox.folded, *kept))


@contextmanager
def inbox_lock(control: Path) -> Iterator[None]:
    """Held for a moment around reading and writing `inbox.json`; never while payloads are copied or folded."""
    path = control / "inbox.lock"
    lock = filelock.FileLock(path, thread_local=False)
    with io.explained("cannot lock the inbox", path):
        lock.acquire(timeout=INBOX_LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def write_inbox(control: Path, inbox: Inbox) -> None:
    told = {
        "seed": inbox.seed,
        "pending": [_as_json(entry) for entry in inbox.pending],
        "folded": [_as_json(entry) for entry in inbox.folded],
    }
    io.write_durably(control / INBOX_FILE, json.dumps(told, indent=1).encode())


def _as_json(entry: Entry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Entry.__slots__}


def retain(inbox: Inbox, *, versions: int, nbytes: int) -> Inbox:
    """Keep the newest `versions` folded versions as far as they fit into `nbytes`."""
    kept: list[Entry] = []
    for entry in reversed(inbox.folded):
        if len(kept) == versions or sum(each.nbytes for each in kept) + entry.nbytes > nbytes:
            break
        kept.insert(0, entry)
    return replace(inbox, folded=tuple(kept))


def sweep(control: Path, *, own: str | None = None, own_places: Collection[str] = ()) -> None:
    """Remove every directory in the inbox that nobody needs. The inbox's lock must be held.

    Needed is what is accepted or kept, what a decided move installs from, and what a live session is receiving; of the
    session named `own`, only `own_places`.
    """
    directory = control / INBOX_DIRECTORY
    found = list(directory.iterdir()) if io.exists(directory) else []
    alive = live_sessions(control).keys() - {own}
    inbox = stored_inbox(control)
    named = {entry.place for entry in (*inbox.pending, *inbox.folded)} | set(own_places)
    decided = read_journal(control / JOURNAL_FILE)
    if decided is not None:
        named |= set(Path(decided.install_from).parts)
    for path in found:
        if path.name not in named and path.name.rpartition("-")[2] not in alive:
            io.remove_tree(path)


def drop_pending(control: Path, *, up_to: int) -> None:
    """Forget what is accepted and pending up to a version: the files hold that one, or it can never be folded."""
    with inbox_lock(control):
        inbox = stored_inbox(control)
        kept = tuple(entry for entry in inbox.pending if entry.version > up_to)
        if len(kept) != len(inbox.pending):
            write_inbox(control, replace(inbox, pending=kept, seed="store"))


def copy_delta(version: PublishedVersion, *, control: Path, session: str, files: OpenFiles) -> Entry:
    """Copy a delta version into the inbox, byte for byte, and sync it. It is a candidate then."""
    entry = new_entry(version.index, version.version, kind="delta", nbytes=version.wire_bytes, session=session)
    path = entry.path(control)
    io.make_directory(path)
    names = [INDEX_NAME, *sorted({tensor.file for tensor in version.tensors.values()})]
    for name in names:
        with files.open(version.path / name) as source, io.WritableFile(path / name, create=True) as target:
            _check_unchanged(version, name, source)
            buffer = np.empty(min(COPY_BYTES, source.nbytes), np.uint8)
            for offset in range(0, source.nbytes, COPY_BYTES):
                part = buffer[: min(COPY_BYTES, source.nbytes - offset)]
                source.read_into(offset, part)
                target.append(part)
            target.fsync()
    io.fsync_directory(path)
    return entry


def _check_unchanged(version: PublishedVersion, name: str, source: SourceFile) -> None:
    """A source that changes under us must not fill the disk with more than was looked at."""
    expected = version.index.index_bytes if name == INDEX_NAME else version.headers[name].file_bytes
    if source.nbytes != expected:
        raise StreamError(
            "a published file has changed while it was read",
            path=version.path / name,
            version=version.version,
            expected=f"{expected} bytes",
            found=f"{source.nbytes} bytes",
        )


def make_scratch(control: Path, *, session: str) -> Path:
    """A directory in the inbox that lives as long as its session, at most."""
    path = control / INBOX_DIRECTORY / f"scratch.{uuid.uuid4().hex[:8]}-{session}"
    io.make_directory(path)
    return path


def new_entry(index: VersionIndex, version: int, *, kind: Literal["delta", "full"], nbytes: int, session: str) -> Entry:
    return Entry(
        version=version,
        base_version=index.base_version if index.is_delta else None,
        kind=kind,
        digest=index.digest,
        stream_id=index.stream_id,
        nbytes=nbytes,
        place=f"{index.digest[:16]}.{uuid.uuid4().hex[:8]}-{session}",
    )
