"""Who is attached to a local directory right now, and which versions they hold prepared.

Each attached process has a session: a file in `.weight_sync/sessions/` that it keeps locked (flock) while it lives, so
that a dead one is recognised without asking anybody. A session may hold a version: ranks have it prepared and may still
roll back to what the mirror's files hold, so that version must not be folded.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from gpusync.mirror import io

SESSIONS_DIRECTORY = "sessions"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A live session. `held` is the lowest version it holds prepared, or None."""

    name: str
    pid: int
    host: str
    held: int | None


class Session:
    """This process's presence at the local directory whose control directory is `control`."""

    def __init__(self, control: Path) -> None:
        self.name = uuid.uuid4().hex[:12]
        self._held: list[int] = []
        self._lock = threading.Lock()
        directory = control / SESSIONS_DIRECTORY
        io.make_directory(directory)
        self._path = directory / self.name
        # locked before it gets its name: a file that another process can see and lock belongs to a dead session
        starting = directory / f".{self.name}"
        self._fd = os.open(starting, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._tell()
        os.rename(starting, self._path)

    def hold(self, version: int) -> None:
        """Keep `version` and later ones out of the files until it is released. May be nested."""
        with self._lock:
            self._held.append(version)
            self._tell()

    def release(self, version: int) -> None:
        """Undo one `hold`; a version that is not held is fine."""
        with self._lock:
            if version in self._held:
                self._held.remove(version)
                self._tell()

    def close(self) -> None:
        """End the session; what it held is free."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _tell(self) -> None:
        held = min(self._held, default=None)
        told = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "held": held}).encode()
        # one write of fixed length: a reader sees the old text or the new one
        os.pwrite(self._fd, told.ljust(512), 0)


def live_sessions(control: Path) -> dict[str, SessionInfo]:
    """Sessions whose process lives, by name. Files of dead ones are removed."""
    found: dict[str, SessionInfo] = {}
    directory = control / SESSIONS_DIRECTORY
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.startswith("."):
            continue  # a session that is being made, and not locked yet
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            info = _parse(path.name, os.pread(fd, 512, 0))
            if info is not None:
                found[path.name] = info
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return found


def lowest_held(control: Path, *, but: str | None = None) -> SessionInfo | None:
    """The live session that holds the lowest version, leaving out the session named `but`; None when none holds any."""
    holding = [info for info in live_sessions(control).values() if info.held is not None and info.name != but]
    return min(holding, key=lambda info: info.held or 0, default=None)


def _parse(name: str, raw: bytes) -> SessionInfo | None:
    try:
        told = json.loads(raw)
        return SessionInfo(name=name, pid=told["pid"], host=told["host"], held=told["held"])
    except (ValueError, KeyError, TypeError):
        return None  # being written for the first time: it holds nothing yet
