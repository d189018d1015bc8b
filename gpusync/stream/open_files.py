"""Many files, few descriptors: a cache of open files that threads share.

A chain of versions has more shards than a process may have files open, so a part of a file holds its file only while it
is being read.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gpusync.errors import NOWHERE, SourceReadError, Where
from gpusync.stream.files import Buffer, ByteSource, SourceFile, check_inside


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
            check_inside(offset, nbytes, file.nbytes, where=place)
        yield _LentRange(self, path, offset=offset, nbytes=nbytes, follow_links=follow_links, where=place)

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
            entry.file = SourceFile(key[0], follow_links=key[1], where=where)
        finally:
            if entry.file is None:
                self._release(key, entry, thread=thread)
        with self._changed:
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

    def __init__(
        self,
        files: OpenFiles,
        path: str | os.PathLike[str],
        *,
        offset: int,
        nbytes: int,
        follow_links: bool,
        where: Where,
    ) -> None:
        self._files = files
        self._path = path
        self._offset = offset
        self._follow_links = follow_links
        self._where = where
        self.nbytes = nbytes

    def read_into(self, offset: int, buffer: Buffer) -> None:
        check_inside(offset, memoryview(buffer).nbytes, self.nbytes, where=self._where)
        with self._files.open(self._path, follow_links=self._follow_links, where=self._where) as file:
            file.read_into(self._offset + offset, buffer, where=self._where)
