"""Waiting for a version that is being published. Which errors time can mend is decided by their class."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpusync.errors import SourceReadError, VersionMissingError

T = TypeVar("T")

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0


def wait_until_visible(
    read: Callable[[], T],
    *,
    refresh: Callable[[], None],
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What `read` returns, once it raises neither VersionMissingError nor SourceReadError.

    `refresh` runs before every look, the first included, while `read` holds no file open: it is where a network
    filesystem is told to look again. After `timeout_s` (0: one look) the last error is raised; every other error, of
    `refresh` too, at once.
    """
    deadline = clock() + timeout_s
    delay = _FIRST_DELAY_S
    while True:
        refresh()
        try:
            return read()
        except (VersionMissingError, SourceReadError):
            left = deadline - clock()
            if left <= 0:
                raise
        sleep(min(delay, left))
        delay = min(2 * delay, _LONGEST_DELAY_S)
