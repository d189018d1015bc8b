"""The journal: the one file whose appearance decides that a local directory moves to another version.

Before `.weight_sync/journal.json` exists nothing that it names has been touched, and everything it needs (redo spools,
files to install) is complete and synced. From then on the move is finished, now or at the next open, whatever happens:
every step is idempotent. The file names what to install and from where, what to remove, which spools to scatter into
which files, and the state and checksums that hold afterwards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gpusync.errors import JournalError
from gpusync.mirror import io, state
from gpusync.mirror.redo import MAX_SPAN_BYTES, read_records
from gpusync.mirror.state import Checksum, FileMark, MirrorState

LOG = logging.getLogger(__name__)
JOURNAL_FILE = "journal.json"
REDO_DIRECTORY = "redo"
INCOMING_DIRECTORY = "incoming"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A decided move. `state.files` is filled in when the move is finished, from the files as they are then.

    `install`: names to move into the directory from `install_from`, a path below `.weight_sync`. `remove`: managed
    names that are not part of the new version. `files`: names that spool records count in; `spools`: spool name to
    length. `checksums`: all of them when `install` replaces the checkpoint, the changed ones otherwise.
    """

    state: MirrorState
    managed: Sequence[str]
    checksums: Mapping[str, Checksum]
    install: Sequence[str] = ()
    install_from: str = INCOMING_DIRECTORY
    remove: Sequence[str] = ()
    files: Sequence[str] = ()
    spools: Mapping[str, int] = field(default_factory=dict)


def commit(directory: Path, journal: Journal) -> None:
    """Decide the move. Its spools and incoming files must be synced by now, and their directories with them."""
    told = {
        "state": json.loads(state.encode_state(journal.state)),
        "managed": list(journal.managed),
        "checksums": state.encode_checksums(journal.checksums),
        "install": list(journal.install),
        "install_from": journal.install_from,
        "remove": list(journal.remove),
        "files": list(journal.files),
        "spools": dict(journal.spools),
    }
    io.write_durably(directory / state.CONTROL_DIRECTORY / JOURNAL_FILE, json.dumps(told, ensure_ascii=False).encode())


def finish(directory: Path, journal: Journal, *, workers: int) -> MirrorState:
    """Carry a decided move out and return the state that holds then. May be repeated after any interruption."""
    control = directory / state.CONTROL_DIRECTORY
    # slime's receiver must find no version while files may be torn: it would chain onto them
    io.unlink(control / state.STATE_FILE)
    io.fsync_directory(control)
    _install(directory, journal)
    _scatter(directory, journal, workers=workers)
    checksums = dict(journal.checksums) if journal.install else {**state.read_checksums(control), **journal.checksums}
    state.write_checksums(control, journal.state.version, checksums)
    marks = {name: mark_file(directory / name) for name in journal.managed}
    now = replace(journal.state, files=marks)
    state.write_state(control, now)
    io.unlink(control / JOURNAL_FILE)
    io.fsync_directory(control)
    discard(directory)
    return now


def recover(directory: Path, *, workers: int) -> MirrorState | None:
    """Finish a decided move that was interrupted (returning its state), drop an undecided one (returning None)."""
    control = directory / state.CONTROL_DIRECTORY
    path = control / JOURNAL_FILE
    if any(io.exists(control / name) for name in (JOURNAL_FILE, REDO_DIRECTORY, INCOMING_DIRECTORY)):
        # What a process did before it was killed is seen here and may not be durable: a journal that is gone could come
        # back after a power loss, and find its spools removed by us.
        io.fsync_directory(control)
        io.fsync_directory(directory)
    try:
        decided = read_journal(path)
        if decided is not None:
            _check_complete(directory, decided)
            return finish(directory, decided, workers=workers)
    except JournalError as error:
        LOG.warning("the move of %s that was decided cannot be finished, and is given up: %s", directory, error)
        # Without a state the files belong to no version, and are seeded anew. They are ours all the same.
        if not io.exists(control / state.CHECKSUMS_FILE):
            state.write_checksums(control, 0, {})
        io.unlink(control / state.STATE_FILE)
        io.unlink(path)
        io.fsync_directory(control)
    discard(directory)
    return None


def discard(directory: Path) -> None:
    """Drop what is prepared, unless it has been decided on."""
    control = directory / state.CONTROL_DIRECTORY
    if io.exists(control / JOURNAL_FILE):
        return
    for name in (REDO_DIRECTORY, INCOMING_DIRECTORY):
        if io.exists(control / name):
            io.remove_tree(control / name)


def mark_file(path: Path) -> FileMark:
    with io.explained("cannot look at", path):
        found = path.stat()
    return FileMark(nbytes=found.st_size, mtime_ns=found.st_mtime_ns)


def read_journal(path: Path) -> Journal | None:
    """The move that is decided and not finished, or None. JournalError when it is not what we wrote."""
    raw = state.read_file(path)
    if not raw and not io.exists(path):
        return None
    try:
        told = json.loads(raw)
        place = Path(told["install_from"])
        if place.is_absolute() or ".." in place.parts:
            raise ValueError(f"no place of ours: {place}")
        return Journal(
            state=MirrorState(
                version=state.version_number(told["state"]["version"]),
                stream_id=told["state"]["stream_id"],
                index_digests={int(v): digest for v, digest in told["state"]["index_digests"].items()},
                base_identity=told["state"]["base_identity"],
            ),
            managed=_names(told["managed"]),
            checksums=state.decode_checksums(told["checksums"]),
            install=_names(told["install"]),
            install_from=str(place),
            remove=_names(told["remove"]),
            files=_names(told["files"]),
            spools={state.plain_name(name): int(nbytes) for name, nbytes in told["spools"].items()},
        )
    except state.DAMAGE as error:
        raise JournalError(f"the journal cannot be read ({error})", path=path) from error


def _names(told: Sequence[object]) -> tuple[str, ...]:
    return tuple(state.plain_name(name) for name in told)


def _check_complete(directory: Path, journal: Journal) -> None:
    """Everything that an interrupted move needs is still there. JournalError, naming what is not."""
    control = directory / state.CONTROL_DIRECTORY
    incoming = control / journal.install_from
    for name in journal.install:
        if not io.exists(incoming / name) and not io.exists(directory / name):
            raise JournalError("a file to be put in place is gone", path=incoming / name)
    installing = set(journal.install)
    for name in (*journal.files, *(each for each in journal.managed if each not in installing)):
        if (directory / name).is_symlink() or not (directory / name).is_file():
            raise JournalError("a file that is to be written is no regular file", path=directory / name)
    for name, nbytes in journal.spools.items():
        path = control / REDO_DIRECTORY / name
        found = path.stat().st_size if io.exists(path) else 0
        if found != nbytes:
            raise JournalError("a redo spool has the wrong length", path=path, expected=nbytes, found=found)


def _install(directory: Path, journal: Journal) -> None:
    incoming = directory / state.CONTROL_DIRECTORY / journal.install_from
    for name in journal.install:
        if io.exists(incoming / name):
            io.rename(incoming / name, directory / name)
    for name in journal.remove:
        io.unlink(directory / name)
    if journal.install or journal.remove:
        io.fsync_directory(directory)


def _scatter(directory: Path, journal: Journal, *, workers: int) -> None:
    if not journal.spools:
        return
    redo = directory / state.CONTROL_DIRECTORY / REDO_DIRECTORY
    with ExitStack() as stack:
        files = [stack.enter_context(io.WritableFile(directory / name, create=False)) for name in journal.files]
        with ThreadPoolExecutor(max_workers=workers) as pool:
            jobs = [pool.submit(_scatter_spool, redo / name, n, files) for name, n in journal.spools.items()]
            for job in jobs:
                job.result()
            for sync in [pool.submit(file.fsync) for file in files]:
                sync.result()


def _scatter_spool(path: Path, nbytes: int, files: Sequence[io.WritableFile]) -> None:
    """Windows are read, changed in memory and written back: through a mapping every page would cost a fault."""
    scratch = np.empty(0, np.uint8)
    for record in read_records(path, nbytes=nbytes):
        if record.span > scratch.size:
            scratch = np.empty(min(max(record.span, 2**20), MAX_SPAN_BYTES), np.uint8)
        window = scratch[: record.span]
        file = files[record.file]
        if record.word_bytes:
            file.read_at(window, record.offset)
        record.apply(window)
        file.write_at(window, record.offset)
