"""Encoding on a pool of threads, in bounded memory, beside an iterator that belongs to the caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_in_order(work: Callable[[A], B], items: Iterator[A], *, workers: int) -> Iterator[B]:
    """`work` of each item on `workers` threads, in the order of the items. `items` is advanced on this thread.

    At most `workers` + 1 items are under way or done and not taken: that bounds memory. The first error, of `items` or
    of `work`, is raised when its turn comes; what was not begun by then is not done.
    """
    running: deque[Future[B]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="gpusync-publish") as pool:
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def drain(items: Iterator[object]) -> None:
    """Run an iterator to its end for what it does on the way: it may gather each tensor from all ranks, and one that
    stopped early would keep the others waiting.
    """
    try:
        for _ in items:
            pass
    # Part of the rank boundary: the first error is what is reported, this one would only hide it.
    except Exception:  # noqa: BLE001
        return
