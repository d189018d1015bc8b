"""Which attempt wrote a file, told from the file's name, and whether that attempt may still be under way.

A token of 24 hex digits: 6 for the host and its process namespace, 6 for the process, 4 for when that began, 8 at
random. A process that is visible here is known to live or to be dead, and of this process every attempt is known; of
any other host only the age of its files can tell.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import threading
import time
from pathlib import Path

# For how long after its last write an attempt of another host counts as under way.
QUIET_SECONDS = 60.0

_lock = threading.Lock()
_under_way: set[str] = set()


def begin_attempt() -> str:
    """A new attempt's token; the attempt is under way until `end_attempt`."""
    token = _process_tag(os.getpid()) + secrets.token_hex(4)
    with _lock:
        _under_way.add(token)
    return token


def end_attempt(token: str) -> None:
    """What files it leaves, or left, are nobody's any more. May be called again."""
    with _lock:
        _under_way.discard(token)


def may_be_under_way(token: str, path: Path) -> bool:
    """Whether the attempt that `path` carries the token of may go on. A file that is gone says nothing: False."""
    tag = token[:16]
    if len(token) == 24 and tag[:6] == _host_tag():
        if tag == _process_tag(os.getpid()):
            with _lock:
                return token in _under_way
        pid = int(tag[6:12], 16)
        return _lives(pid) and tag == _process_tag(pid)
    try:
        # Clocks differ: what seems to come from the near future is as young.
        return abs(time.time() - os.stat(path, follow_symlinks=False).st_mtime) < QUIET_SECONDS
    except OSError:
        return False


@functools.cache
def _host_tag() -> str:
    """A process number means something only since this boot and in this namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(3)
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=3).hexdigest()


def _process_tag(pid: int) -> str:
    """Process numbers are given anew; with the start of the process they are as good as unique."""
    fields = _stat(pid)
    start = int(fields[19]) if fields else 0
    return f"{_host_tag()}{pid & 0xFFFFFF:06x}{start & 0xFFFF:04x}"


def _lives(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _stat(pid: int) -> list[bytes]:
    """What /proc says of a process, from its state on; nothing if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The name before it is in brackets, and may hold blanks and brackets itself.
    return text[text.rindex(b")") + 1 :].split()
