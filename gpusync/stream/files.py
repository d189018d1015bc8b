"""Reading bytes of regular files by position, and nothing else: no mapping, no links, no devices, no surprise waits.

An I/O error is an exception here; with a mapped file it would be a SIGBUS. A file is read through `pread`, so threads
share one descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
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
    """One regular file, open for reading. `nbytes` and `mtime_ns` are what they were when it was opened."""

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
        self.mtime_ns = status.st_mtime_ns

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
        self._where = Where(path=file.path, version=where.version, tensor=where.tensor)
        check_inside(offset, nbytes, file.nbytes, where=self._where)
        self._file = file
        self._offset = offset
        self.nbytes = nbytes

    def read_into(self, offset: int, buffer: Buffer) -> None:
        check_inside(offset, memoryview(buffer).nbytes, self.nbytes, where=self._where)
        self._file.read_into(self._offset + offset, buffer, where=self._where)


class BytesSource:
    """A ByteSource over bytes in memory."""

    def __init__(self, data: bytes | Buffer, *, where: Where = NOWHERE) -> None:
        view = memoryview(data)
        self.data = view.cast("B") if view.nbytes else memoryview(b"")
        self._where = where
        self.nbytes = len(self.data)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        check_inside(offset, view.nbytes, self.nbytes, where=self._where)
        if view.nbytes:
            view.cast("B")[:] = self.data[offset : offset + view.nbytes]


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


def check_inside(offset: int, nbytes: int, limit: int, *, where: Where) -> None:
    """Raises HeaderError unless the bytes lie within the first `limit`."""
    if offset < 0 or nbytes < 0 or offset + nbytes > limit:
        raise HeaderError(
            "bytes outside of their range", where=where, expected=f"within 0..{limit}", found=f"{offset}+{nbytes}"
        )
