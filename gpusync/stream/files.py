"""Reading bytes of regular files by position, and nothing else: no mapping, no links, no devices, no surprise waits.

An I/O error is an exception here; with a mapped file it would be a SIGBUS. A file is read through `pread`, so threads
share one descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpusync.errors import NOWHERE, HeaderError, SourceReadError, StreamError, VersionMissingError, Where

Buffer = bytearray | memoryview | npt.NDArray[np.uint8]
"""A writable, contiguous buffer of bytes."""


class ByteSource(Protocol):
    """A run of bytes that can be read at any place."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fills all of `buffer` with the bytes from `offset` on, or raises a GpusyncError."""
        ...


class SourceFile:
    """One regular file, open for reading. Its length is what it was when it was opened."""

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool = False, where: Where = NOWHERE) -> None:
        """Raises VersionMissingError where there is no such file, StreamError for anything but a regular file (with
        `follow_links`, a link to one will do), SourceReadError for every other failure. Never blocks on a FIFO.
        """
        self.path = Path(path)
        self._where = Where(path=os.fspath(path), version=where.version, tensor=where.tensor)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            # Looked at before it is opened as well: to open a device can already have an effect.
            _refuse_special(os.stat(self.path, follow_symlinks=follow_links), where=self._where)
            self._fd = os.open(self.path, flags)
        except OSError as problem:
            raise _open_error(problem, where=self._where) from problem
        try:
            status = os.fstat(self._fd)
            _refuse_special(status, where=self._where)
        except OSError as problem:
            self.close()
            raise _open_error(problem, where=self._where) from problem
        except StreamError:
            self.close()
            raise
        self.nbytes = status.st_size

    def read_at(self, offset: int, nbytes: int, *, where: Where | None = None) -> bytes:
        """`nbytes` bytes from `offset` on. Errors as `read_into`."""
        buffer = bytearray(nbytes)
        self.read_into(offset, buffer, where=where)
        return bytes(buffer)

    def read_into(self, offset: int, buffer: Buffer, *, where: Where | None = None) -> None:
        """Fills all of `buffer`. Raises HeaderError where the file ends first, SourceReadError where reading fails;
        both speak of `where` if it is given.
        """
        view = memoryview(buffer)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as problem:
                raise SourceReadError("read failed", where=where or self._where, found=problem.strerror) from problem
            if got == 0:
                raise HeaderError(
                    "file ends too early", where=where or self._where, expected=offset + len(view), found=offset + done
                )
            done += got

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileRange:
    """A ByteSource: `nbytes` bytes of an open file from `offset` on. The file stays the caller's to close."""

    def __init__(self, file: SourceFile, *, offset: int, nbytes: int, where: Where = NOWHERE) -> None:
        self._where = where if where.path is not None else Where(path=file.path, tensor=where.tensor)
        _check_inside(offset, nbytes, file.nbytes, where=self._where)
        self._file = file
        self._offset = offset
        self.nbytes = nbytes

    def read_into(self, offset: int, buffer: Buffer) -> None:
        _check_inside(offset, memoryview(buffer).nbytes, self.nbytes, where=self._where)
        self._file.read_into(self._offset + offset, buffer, where=self._where)


class BytesSource:
    """A ByteSource over bytes in memory."""

    def __init__(self, data: bytes | Buffer, *, where: Where = NOWHERE) -> None:
        view = memoryview(data)
        self._data = view.cast("B") if view.nbytes else memoryview(b"")
        self._where = where
        self.nbytes = len(self._data)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        _check_inside(offset, view.nbytes, self.nbytes, where=self._where)
        if view.nbytes:
            view.cast("B")[:] = self._data[offset : offset + view.nbytes]


class OpenFiles:
    """Open files, kept for reuse, never more than `limit` of them at once. Safe to share among threads.

    Lives as long as one transaction: a file that is replaced on disk meanwhile is still read as it was opened.
    """

    def __init__(self, limit: int = 128) -> None:
        if limit < 1:
            raise ValueError("a cache of files needs room for one")
        self._limit = limit
        self._changed = threading.Condition()
        self._entries: OrderedDict[tuple[str, bool], _Entry] = OrderedDict()  # least recently used first
        self._held: Counter[int] = Counter()
        self._closed = False

    @contextmanager
    def open(
        self, path: str | os.PathLike[str], *, follow_links: bool = False, where: Where = NOWHERE
    ) -> Iterator[SourceFile]:
        """The file at `path`, not to be closed by the caller. Errors as `SourceFile`.

        While all `limit` files are in use, a thread waits for another to let go of one; a thread that itself holds
        one gets a SourceReadError instead, because two such threads would wait for each other for ever.
        """
        key = (os.fspath(path), follow_links)
        thread = threading.get_ident()
        entry = self._acquire(key, thread=thread, where=Where(path=key[0], version=where.version))
        try:
            yield entry.opened()
        finally:
            self._release(key, entry, thread=thread)

    @contextmanager
    def open_range(
        self,
        path: str | os.PathLike[str],
        *,
        offset: int,
        nbytes: int,
        follow_links: bool = False,
        where: Where = NOWHERE,
    ) -> Iterator[ByteSource]:
        """A part of a file as a ByteSource. The file is there and long enough on entry.

        It is held only while a read runs, so a caller may have any number of ranges open at once. Should it have to
        be opened again and be gone or shorter by then, the read raises VersionMissingError or HeaderError.
        """
        place = Where(path=os.fspath(path), version=where.version, tensor=where.tensor)
        with self.open(path, follow_links=follow_links, where=place) as file:
            _check_inside(offset, nbytes, file.nbytes, where=place)
        yield _LentRange(self, offset=offset, nbytes=nbytes, follow_links=follow_links, where=place)

    def close(self) -> None:
        """Closes every file, those still in use as soon as they are let go of."""
        with self._changed:
            self._closed = True
            for key in [key for key, entry in self._entries.items() if entry.users == 0]:
                self._entries.pop(key).close()
            self._changed.notify_all()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self, key: tuple[str, bool], *, thread: int, where: Where) -> _Entry:
        with self._changed:
            while True:
                if self._closed:
                    raise ValueError("this cache of files is closed")
                entry = self._entries.get(key)
                if entry is not None and entry.file is not None:
                    entry.users += 1
                    self._held[thread] += 1
                    self._entries.move_to_end(key)
                    return entry
                if entry is None and self._make_room():
                    break
                if entry is None and self._held[thread]:
                    raise SourceReadError("too many files in use at once", where=where, expected=self._limit)
                self._changed.wait()  # for room, or for the thread that is just opening this file
            entry = self._entries[key] = _Entry()
            self._held[thread] += 1
        # Opened without the lock: on a network filesystem this takes long, and others have their own files to open.
        try:
            file = SourceFile(key[0], follow_links=key[1], where=where)
        except BaseException:
            self._release(key, entry, thread=thread)
            raise
        with self._changed:
            entry.file = file
            self._changed.notify_all()
        return entry

    def _make_room(self) -> bool:
        if len(self._entries) >= self._limit:
            idle = next((key for key, entry in self._entries.items() if entry.users == 0), None)
            if idle is None:
                return False
            self._entries.pop(idle).close()
        return True

    def _release(self, key: tuple[str, bool], entry: _Entry, *, thread: int) -> None:
        with self._changed:
            entry.users -= 1
            self._held[thread] -= 1
            if not self._held[thread]:
                del self._held[thread]
            if entry.users == 0 and (self._closed or entry.file is None):
                del self._entries[key]
                entry.close()
            self._changed.notify_all()


class _Entry:
    """A place in the cache: a file and how many use it, or, while `file` is None, one that is being opened."""

    __slots__ = ("file", "users")

    def __init__(self) -> None:
        self.file: SourceFile | None = None
        self.users = 1

    def opened(self) -> SourceFile:
        if self.file is None:
            raise ValueError("not open")
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _LentRange:
    """A ByteSource that borrows its file from an OpenFiles for each read."""

    def __init__(self, files: OpenFiles, *, offset: int, nbytes: int, follow_links: bool, where: Where) -> None:
        self._files = files
        self._offset = offset
        self._follow_links = follow_links
        self._where = where
        self.nbytes = nbytes

    def read_into(self, offset: int, buffer: Buffer) -> None:
        _check_inside(offset, memoryview(buffer).nbytes, self.nbytes, where=self._where)
        path = self._where.path
        if path is None:
            raise ValueError("a lent range has a path")
        with self._files.open(path, follow_links=self._follow_links, where=self._where) as file:
            file.read_into(self._offset + offset, buffer, where=self._where)


def _refuse_special(status: os.stat_result, *, where: Where) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}
    found = kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")
    raise StreamError("not a regular file", where=where, expected="a regular file", found=found)


def _open_error(problem: OSError, *, where: Where) -> StreamError | VersionMissingError | SourceReadError:
    if problem.errno == errno.ENOENT:
        return VersionMissingError("file is not there", where=where)
    if problem.errno == errno.ELOOP:
        return StreamError("not a regular file", where=where, expected="a regular file", found="a symbolic link")
    return SourceReadError("file cannot be opened", where=where, found=problem.strerror)


def _check_inside(offset: int, nbytes: int, limit: int, *, where: Where) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > limit:
        raise HeaderError(
            "bytes outside of their range", where=where, expected=f"within 0..{limit}", found=f"{offset}+{nbytes}"
        )
