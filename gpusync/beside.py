"""Work in a process that serves meanwhile, in another thread: how long that one waits for Python's interpreter.

A thread that has let go of the interpreter, as each call into torch does, gets it back after the switch interval: 5 ms,
again and again, while another one runs Python. And a full collection of garbage looks at every object there is, a
model's thousands of tensors among them, and stops everybody for 0.2 s and more; what leads the collector to it is many
new objects that live for a while, as those of an update do.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 2e-5
YOUNG_OBJECTS = 100_000
"""New ones between two collections of the young (Python's own number is 700 to 2,000): bounds others' garbage. Those of
an update are mostly gone before they would count as old."""

_lock = threading.Lock()
_inside: list[tuple[float, tuple[int, int, int]]] = []
"""What was set before, once for each thread that is inside."""


@contextmanager
def beside_serving() -> Iterator[None]:
    """For the whole process, until the last thread is out again. Settings that go further already stay."""
    with _lock:
        interval, (young, *old) = before = sys.getswitchinterval(), gc.get_threshold()
        _inside.append(_inside[0] if _inside else before)
        sys.setswitchinterval(min(interval, SWITCH_INTERVAL_S))
        gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *old)
    try:
        yield
    finally:
        with _lock:
            interval, thresholds = _inside.pop()
            if not _inside:
                sys.setswitchinterval(interval)
                gc.set_threshold(*thresholds)


@contextmanager
def without_collection() -> Iterator[None]:
    """For a pause, which is short: no garbage is collected at all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
