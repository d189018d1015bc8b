"""Every change to a local checkpoint directory, and nothing else: create, write, fsync, rename, unlink, mkdir.

One narrow place, so that durability can be reasoned about and tested: an observer sees each step before and after it
happens (crash tests stop the process there, power-loss tests keep their own account of what was synced). Operating
system errors become MirrorError with the path and, where the disk is full, what was needed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpusync.errors import MirrorError

Bytes = npt.NDArray[np.uint8]
Step = Literal["create", "open", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "rmtree", "fsync_dir"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step on the local directory. `data` is what is written at `offset`; `to` where a rename leads."""

    step: Step
    path: Path
    done: bool
    offset: int = 0
    data: bytes | memoryview | Bytes = b""
    to: Path | None = None


Observer = Callable[[Event], None]
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Show every step of this process, from any thread, to `observer`. For tests."""
    global _observer  # noqa: PLW0603
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


@contextmanager
def _step(
    step: Step, path: Path, *, offset: int = 0, data: bytes | memoryview | Bytes = b"", to: Path | None = None
) -> Iterator[None]:
    try:
        if _observer is not None:
            _observer(Event(step=step, path=path, done=False, offset=offset, data=data, to=to))
        yield
        if _observer is not None:
            _observer(Event(step=step, path=path, done=True, offset=offset, data=data, to=to))
    except OSError as error:
        raise mirror_error(error, f"cannot {step.replace('_', ' ')}", path, needed_bytes=len(data)) from error


def mirror_error(error: OSError, what: str, path: Path, *, needed_bytes: int = 0) -> MirrorError:
    """The MirrorError for an operating-system error; for a full disk with what was needed and what is free."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return MirrorError(f"{what}: {error.strerror or error}", path=path)
    room = f"room for {needed_bytes} more bytes" if needed_bytes else "room for one more name"
    return MirrorError(f"{what}: {error.strerror}", path=path, expected=room, found=_free_bytes(path))


def _free_bytes(path: Path) -> str | None:
    for directory in (path, *path.parents):
        with suppress(OSError):
            return f"{shutil.disk_usage(directory).free} bytes free"
    return None


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turn any operating-system error into a MirrorError that names its file, or else `path`."""
    try:
        yield
    except OSError as error:
        raise mirror_error(error, what, Path(os.fsdecode(error.filename or path))) from error


def exists(path: Path) -> bool:
    """Whether the name is there. An error is an error, and not a no."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise mirror_error(error, "cannot look at", path) from error
    return True


class WritableFile:
    """A file of the local directory, open for writing. Never follows a link. Closing does not sync."""

    __slots__ = ("_fd", "nbytes", "path")

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        with _step("create" if create else "open", path):
            self._fd = os.open(path, flags, 0o666)
        self.path = path
        self.nbytes = os.fstat(self._fd).st_size

    def write_at(self, data: bytes | memoryview | Bytes, offset: int) -> None:
        view = memoryview(data).cast("B")
        with _step("write", self.path, offset=offset, data=view):
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], offset + at)
        self.nbytes = max(self.nbytes, offset + len(view))

    def read_at(self, buffer: Bytes, offset: int) -> None:
        """Fill `buffer` from `offset` on. MirrorError when the file ends before that."""
        at, view = 0, memoryview(buffer)
        try:
            while at < len(view):
                got = os.preadv(self._fd, [view[at:]], offset + at)
                if not got:
                    raise MirrorError(
                        "a local file ended early", path=self.path, expected=offset + len(view), found=offset + at
                    )
                at += got
        except OSError as error:
            raise mirror_error(error, "cannot read", self.path) from error

    def append(self, data: bytes | memoryview | Bytes) -> None:
        self.write_at(data, self.nbytes)

    def allocate(self, nbytes: int) -> None:
        """Take the room for `nbytes` now, so that a full disk is noticed before any work is done."""
        with _step("truncate", self.path, offset=nbytes):
            try:
                _reserve(self._fd, nbytes)
                os.ftruncate(self._fd, nbytes)
            except OSError as error:
                raise mirror_error(error, "cannot allocate", self.path, needed_bytes=nbytes) from error
        self.nbytes = nbytes

    def fsync(self) -> None:
        with _step("fsync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> WritableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, each entry synced in its parent. Being there already is fine."""
    missing = [directory for directory in (path, *path.parents) if not exists(directory)]
    for directory in reversed(missing):
        with _step("mkdir", directory):
            directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


def sync_names_above(path: Path) -> None:
    """Make the name of a directory that is there durable, and those of the directories above it on its filesystem.

    One that we cannot read was not made by us, and is passed over.
    """
    for directory in (path, *path.parents):
        if os.path.ismount(directory):
            return
        if os.access(directory.parent, os.R_OK):
            fsync_directory(directory.parent)


def rename(source: Path, target: Path) -> None:
    """Replace `target` by `source`. Durable only after the directory has been synced."""
    with _step("rename", source, to=target):
        os.replace(source, target)


def unlink(path: Path) -> None:
    """Remove a file or link; its absence is fine."""
    with _step("unlink", path):
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory of ours with everything in it; its absence is fine, and so is company while removing it.

    Links are removed, not followed.
    """
    with _step("rmtree", path):
        while os.path.lexists(path):
            with suppress(FileNotFoundError):
                if path.is_symlink() or path.is_file():
                    path.unlink()
                else:
                    shutil.rmtree(path)


def fsync_directory(path: Path) -> None:
    """Make creations, renames and removals in `path` durable."""
    with _step("fsync_dir", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data` in one step: after a crash it holds the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    unlink(temporary)
    with WritableFile(temporary, create=True) as file:
        file.append(data)
        file.fsync()
    rename(temporary, path)
    fsync_directory(path.parent)
