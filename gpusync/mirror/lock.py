"""One lock per local checkpoint directory: whoever holds it may change the mirror's files.

The lock is the kernel's (flock on `.weight_sync/lock`), so it ends with the process that held it, however that ended.
Who holds it stands beside it in `.weight_sync/lock.json`, for the message of those who wait in vain.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from gpusync.errors import LockTimeoutError
from gpusync.mirror import io
from gpusync.mirror.state import DAMAGE, STATE_FILE


@contextmanager
def local_lock(control: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of the control directory `control` (`.weight_sync`, made when missing).

    Excludes other processes and other threads of this one. Raises LockTimeoutError, naming the holder's process, host
    and since when, after `timeout_s` seconds.
    """
    io.make_directory(control)
    if not io.exists(control / STATE_FILE):
        # nothing was made durable here yet: who made these directories may have been killed before they were synced
        io.sync_names_above(control)
    lock = filelock.FileLock(control / "lock", timeout=timeout_s, thread_local=False)
    owner = control / "lock.json"
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise LockTimeoutError(
            f"the local checkpoint is locked by {_holder(owner)}",
            path=control.parent,
            expected=f"the lock within {timeout_s:g} s",
        ) from error
    except OSError as error:
        raise io.mirror_error(error, "cannot lock the local checkpoint", control / "lock") from error
    try:
        with suppress(OSError):  # it is but a note: a full disk shall not stop those who need no room
            owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
        lock.release()


def _holder(owner: Path) -> str:
    try:
        told = json.loads(owner.read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(told["since"])))
        return f"process {int(told['pid'])} on {told['host']!s} since {since}"
    except (OSError, *DAMAGE):
        return "an unknown process"
