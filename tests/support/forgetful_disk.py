"""A disk that forgets: what is surely on the medium after a number of steps, and what may be.

The model, as pessimistic as POSIX lets a filesystem be:

- A write may reach the medium at any time after it began, page by page (4 KiB) in any order. Until the file is synced
  each page is what it was at the last sync or any of its later states; so is, by itself, the length. A page that never
  came there reads as zeros. The time of change follows the same rule.
- Creating, renaming and removing are entries of a directory. Until *that directory* is synced (for a rename: the one it
  leads to), any subset of them may be lost. A rename is one: both names or neither. Syncing a file does not sync its
  name.
- A sync covers what began before it did, and counts only once it has returned.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Logged:
    """An event as it was, with its data copied, its thread, and the file's time of change once it was done."""

    step: str
    path: Path
    done: bool
    thread: int
    offset: int = 0
    data: bytes = b""
    to: Path | None = None
    mtime_ns: int | None = None


@dataclass(eq=False)
class File:
    """`synced` is surely on the medium; `pages`, `lengths` and `mtimes` hold every later state, oldest first."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    synced_mtime: int = 0
    pages: dict[int, list[bytes]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    mtimes: list[int] = field(default_factory=list)
    syncing: dict[int, File] = field(default_factory=dict)

    def write(self, data: bytes, offset: int) -> None:
        if not data:
            return
        end = offset + len(data)
        if end > len(self.content):
            self.set_length(end)
        self.content[offset:end] = data
        self._note_pages(offset, end)

    def set_length(self, nbytes: int) -> None:
        if nbytes < len(self.content):
            raise NotImplementedError("no file of a local directory shrinks")
        self.content.extend(bytes(nbytes - len(self.content)))
        self.lengths.append(nbytes)

    def _note_pages(self, begin: int, end: int) -> None:
        for page in range(begin // PAGE_BYTES, -(-end // PAGE_BYTES)):
            self.pages.setdefault(page, []).append(_page(self.content, page))

    def begin_sync(self, thread: int) -> None:
        self.syncing[thread] = File(
            synced=bytes(self.content),
            synced_mtime=self.mtimes[-1] if self.mtimes else self.synced_mtime,
            pages={page: list(states) for page, states in self.pages.items()},
            lengths=list(self.lengths),
            mtimes=list(self.mtimes),
        )

    def end_sync(self, thread: int) -> None:
        covered = self.syncing.pop(thread)
        self.synced, self.synced_mtime = covered.synced, covered.synced_mtime
        self.lengths = self.lengths[len(covered.lengths) :]
        self.mtimes = self.mtimes[len(covered.mtimes) :]
        later = {page: states[len(covered.pages.get(page, [])) :] for page, states in self.pages.items()}
        self.pages = {page: states for page, states in later.items() if states}

    def survive(self, rng: random.Random, keep: float) -> tuple[bytes, int]:
        """Some content and time of change that may be found afterwards; unsynced pages are kept with chance `keep`."""
        length = _pick([len(self.synced), *self.lengths], rng, keep)
        found = bytearray()
        for page in range(-(-length // PAGE_BYTES)):
            found += _pick([_page(self.synced, page), *self.pages.get(page, [])], rng, keep)
        return bytes(found[:length]), _pick([self.synced_mtime, *self.mtimes], rng, keep)


@dataclass(frozen=True)
class Link:
    """A symbolic link that was there at the start. What it leads to is not ours and does not change."""

    target: str


@dataclass(eq=False)
class Directory:
    """`entries` as processes see them now; `synced` maps a name to (number of the change, what it named then)."""

    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, tuple[int, Node | None]] = field(default_factory=dict)
    syncing: dict[int, int] = field(default_factory=dict)


Node = File | Link | Directory


@dataclass(frozen=True)
class Change:
    """One change of entries: all of `effects` or none. Sure once `home` has been synced."""

    number: int
    home: Directory
    effects: tuple[tuple[Directory, str, Node | None], ...]


class Disk:
    """What is on the medium and what may be."""

    def __init__(self) -> None:
        self.root = Directory()
        self.pending: list[Change] = []
        self._numbers = itertools.count(1)

    @classmethod
    def load(cls, root: Path) -> Disk:
        """The tree at `root` as it is, all of it on the medium."""
        disk = cls()
        _load(disk.root, root)
        return disk

    def copy(self) -> Disk:
        """As it was loaded; only a disk that nothing has happened to can be copied."""
        if self.pending:
            raise ValueError("changes are pending")
        disk = Disk()
        _copy_synced(self.root, disk.root)
        return disk

    def take(self, logged: Logged, root: Path) -> None:
        """Writes and changes of entries count from their begin, syncs from their end, for what was there at begin."""
        if logged.step in ("fsync", "fsync_dir"):
            self._sync(logged, root)
        elif not logged.done:
            self._change(logged, root)
        elif logged.mtime_ns is not None:
            self._file(logged.path, root).mtimes.append(logged.mtime_ns)

    def survive(self, directory: Path, rng: random.Random) -> None:
        """Write to `directory` one of the trees that may be found after the power failed now."""
        keep = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        kept = _some(self.pending, rng, keep)
        found: dict[Directory, dict[str, tuple[int, Node | None]]] = {}
        for change in kept:
            for home, name, what in change.effects:
                names = found.setdefault(home, dict(home.synced))
                if names.get(name, (0, None))[0] < change.number:
                    names[name] = (change.number, what)
        _write_tree(self.root, directory, found, rng, keep)

    def _sync(self, logged: Logged, root: Path) -> None:
        if logged.step == "fsync":
            file = self._file(logged.path, root)
            (file.end_sync if logged.done else file.begin_sync)(logged.thread)
            return
        home = self._directory(logged.path, root)
        if not logged.done:
            home.syncing[logged.thread] = self.pending[-1].number if self.pending else 0
            return
        covered = home.syncing.pop(logged.thread)
        sure = [change for change in self.pending if change.home is home and change.number <= covered]
        for change in sure:
            for where, name, what in change.effects:
                if where.synced.get(name, (0, None))[0] < change.number:
                    where.synced[name] = (change.number, what)
            self.pending.remove(change)

    def _change(self, logged: Logged, root: Path) -> None:
        name = logged.path.name
        if logged.step == "write":
            self._file(logged.path, root).write(logged.data, logged.offset)
        elif logged.step == "truncate":
            self._file(logged.path, root).set_length(logged.offset)
        elif logged.step == "rename" and logged.to is not None:
            home, left = self._directory(logged.to.parent, root), self._directory(logged.path.parent, root)
            self._enter(home, (home, logged.to.name, left.entries[name]), (left, name, None))
        elif logged.step == "rmtree":
            self._remove_tree(self._directory(logged.path.parent, root), name)
        else:
            home = self._directory(logged.path.parent, root)
            new = {"create": File, "mkdir": Directory, "unlink": lambda: None}[logged.step]()
            self._enter(home, (home, name, new))

    def _enter(self, home: Directory, *effects: tuple[Directory, str, Node | None]) -> None:
        for where, name, what in effects:
            if what is None:
                where.entries.pop(name, None)
            else:
                where.entries[name] = what
        self.pending.append(Change(next(self._numbers), home, effects))

    def _remove_tree(self, home: Directory, name: str) -> None:
        found = home.entries.get(name)
        if isinstance(found, Directory):
            for inner in list(found.entries):
                self._remove_tree(found, inner)
        self._enter(home, (home, name, None))

    def _directory(self, path: Path, root: Path) -> Directory:
        at = self.root
        for part in path.relative_to(root).parts:
            found = at.entries[part]
            if not isinstance(found, Directory):
                raise NotADirectoryError(path)
            at = found
        return at

    def _file(self, path: Path, root: Path) -> File:
        found = self._directory(path.parent, root).entries[path.name]
        if not isinstance(found, File):
            raise IsADirectoryError(path)
        return found


def _some(changes: Sequence[Change], rng: random.Random, keep: float) -> list[Change]:
    """Any subset; often one that is a likely trap: a beginning, all but one, one alone."""
    one = rng.randrange(len(changes)) if changes else 0
    return rng.choice(
        [
            [*changes[:one]],
            [*changes[:one], *changes[one + 1 :]],
            [*changes[one : one + 1]],
            [change for change in changes if rng.random() < keep],
            [change for change in changes if rng.random() < keep],
        ]
    )


def _page(content: bytes | bytearray, page: int) -> bytes:
    return bytes(content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]).ljust(PAGE_BYTES, b"\0")


def _pick(states: Sequence, rng: random.Random, keep: float):
    """The newest state with chance `keep`, else any of the older ones, most often the one that is surely there."""
    if len(states) == 1 or rng.random() < keep:
        return states[-1]
    return states[0] if rng.random() < 0.7 else rng.choice(states[:-1])


def _load(directory: Directory, path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            new: Node = Directory()
            _load(new, entry)
        elif entry.is_symlink():
            new = Link(os.readlink(entry))
        else:
            new = File(bytearray(entry.read_bytes()), entry.read_bytes(), entry.stat().st_mtime_ns)
        directory.entries[entry.name] = new
        directory.synced[entry.name] = (0, new)


def _copy_synced(directory: Directory, target: Directory) -> None:
    for name, what in directory.entries.items():
        if isinstance(what, Directory):
            new: Node = Directory()
            _copy_synced(what, new)
        elif isinstance(what, Link):
            new = what
        else:
            new = File(bytearray(what.synced), what.synced, what.synced_mtime)
        target.entries[name] = new
        target.synced[name] = (0, new)


def _write_tree(
    directory: Directory,
    path: Path,
    found: dict[Directory, dict[str, tuple[int, Node | None]]],
    rng: random.Random,
    keep: float,
) -> None:
    path.mkdir(exist_ok=True)
    for name, what in _named(found.get(directory, directory.synced)):
        if isinstance(what, Directory):
            _write_tree(what, path / name, found, rng, keep)
        elif isinstance(what, Link):
            (path / name).symlink_to(what.target)
        else:
            data, mtime_ns = what.survive(rng, keep)
            (path / name).write_bytes(data)
            os.utime(path / name, ns=(mtime_ns, mtime_ns))


def _named(names: dict[str, tuple[int, Node | None]]) -> Iterator[tuple[str, Node]]:
    """In a fixed order, so that one seed always gives one tree."""
    for name in sorted(names):
        what = names[name][1]
        if what is not None:
            yield name, what
