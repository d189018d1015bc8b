"""Waiting with an end: deadlines, and calls into a library that may never come back.

A client of torch's TCPStore blocks for ever when the process that serves the store is stopped, whatever time-out it was
given. Such calls run in a thread of their own, which is left behind when it does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# What torch's stores and process groups raise, and what sockets do. CancelledError: the worker itself broke.
LIBRARY_ERRORS = (RuntimeError, OSError, ValueError, CancelledError)


class Deadline:
    """A point in time, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.left_s() == 0.0


class Worker:
    """One daemon thread that does calls in turn. A daemon, so that a call that is stuck cannot hold up the exit."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """The result of `work`, or what it raised of LIBRARY_ERRORS.

        Raises TimeoutError when it takes longer: then it still runs, and this worker is of no more use.
        """
        future: Future[T] = Future()
        self._calls.put((work, future))
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise TimeoutError(f"no answer within {timeout_s:.3g} s") from error

    def close(self) -> None:
        """The thread ends after the calls it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except LIBRARY_ERRORS as error:
                future.set_exception(error)
            finally:
                # Anything else is a bug: the thread ends with its traceback, and the caller is not left waiting.
                future.cancel()
            # Neither a store nor a result may live on while this thread waits for the next call.
            del item, work, future


def call_bounded(work: Callable[[], T], *, timeout_s: float, name: str) -> T:
    """One call in a thread of its own. Raises TimeoutError when it takes longer: then it still runs."""
    worker = Worker(name)
    try:
        return worker.call(work, timeout_s=timeout_s)
    finally:
        worker.close()
