"""A filesystem that fails: calls to the system on files below a directory, counted, and made to fail on demand.

Wraps the functions of `os` (and `io.open`, which pathlib reads through). The error comes instead of the call: nothing
of it has happened.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

WRITES = frozenset({"pwrite", "fallocate", "ftruncate", "create", "mkdir", "rename"})
CHANGES = WRITES | {"open for writing", "unlink", "rmdir"}
READS = frozenset({"preadv", "read"})
LOOKS = frozenset({"stat", "list", "open"})


@dataclass(frozen=True)
class Call:
    """One call to the system: what, on which file."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@dataclass
class Filesystem:
    """What is below `root`. `fails(call, number)` gives the errno that call number `number` (from 0) fails with."""

    root: Path
    fails: Callable[[Call, int], int | None] = lambda _call, _number: None
    calls: list[Call] = field(default_factory=list)
    failed: list[Call] = field(default_factory=list)

    def passes(self, name: str, path: Any) -> None:
        """Note the call; raise if it is to fail."""
        place = os.path.abspath(os.fsdecode(path))
        if not Path(place).is_relative_to(self.root):
            return
        call = Call(name, os.path.relpath(place, self.root))
        code = self.fails(call, len(self.calls))
        self.calls.append(call)
        if code is not None:
            self.failed.append(call)
            raise OSError(code, os.strerror(code), place)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with mock.patch.multiple(os, **self._wrapped()), mock.patch.object(io, "open", self._open_text_or_bytes):
            yield

    def _wrapped(self) -> dict[str, Callable[..., Any]]:
        by_fd = {
            "pwrite": "pwrite",
            "preadv": "preadv",
            "fsync": "fsync",
            "ftruncate": "ftruncate",
            "posix_fallocate": "fallocate",
        }
        by_path = {
            "replace": "rename",
            "rename": "rename",
            "mkdir": "mkdir",
            "unlink": "unlink",
            "remove": "unlink",
            "rmdir": "rmdir",
            "stat": "stat",
            "lstat": "stat",
            "listdir": "list",
            "scandir": "list",
        }
        wrapped = {name: self._on_fd(getattr(os, name), told) for name, told in by_fd.items()}
        wrapped |= {name: self._on_path(getattr(os, name), told) for name, told in by_path.items()}
        return wrapped | {"open": self._on_open(os.open)}

    def _on_fd(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            self.passes(name, _path_of(fd))
            return real(fd, *args)

        return call

    def _on_path(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            directory = options.get("dir_fd")
            if isinstance(path, int):
                self.passes(name, _path_of(path))
            else:
                self.passes(name, path if directory is None else os.path.join(_path_of(directory), path))
            return real(path, *args, **options)

        return call

    def _on_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
            directory = options.get("dir_fd")
            place = path if directory is None else os.path.join(_path_of(directory), path)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            creates = flags & os.O_CREAT and not os.path.lexists(place)
            self.passes("create" if creates else "open for writing" if writes else "open", place)
            return real(path, flags, *args, **options)

        return call

    def _open_text_or_bytes(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode.startswith("r"):
            self.passes("open", path)
            self.passes("read", path)  # as the error of a read would come: while the file is open
        else:
            self.passes("create", path)
        return open(path, mode, *args, **options)


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def once(number: int, code: int) -> Callable[[Call, int], int | None]:
    """Only call number `number` fails."""
    return lambda _call, at: code if at == number else None


def from_then_on(number: int, code: int, names: frozenset[str]) -> Callable[[Call, int], int | None]:
    """Every call of `names` fails from call number `number` on: the disk is full, or read-only."""
    return lambda call, at: code if at >= number and call.name in names else None


def always(code: int, names: frozenset[str]) -> Callable[[Call, int], int | None]:
    return from_then_on(0, code, names)


FULL, BROKEN, READ_ONLY, DENIED = errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES
