"""A few threads that share a list of jobs. The work itself (zstd, digests, numpy, file I/O) releases the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

J = TypeVar("J")


def for_each(jobs: Iterable[J], work: Callable[[int, J], None], *, workers: int, size: Callable[[J], int]) -> None:
    """Call `work(worker number, job)` for every job, the largest first so that the threads end together.

    The first exception stops the others from taking further jobs and is raised here once all have stopped.
    """
    queue = deque(sorted(jobs, key=size, reverse=True))
    stop = threading.Event()

    def run(worker: int) -> None:
        while not stop.is_set():
            try:
                job = queue.popleft()
            except IndexError:
                return
            try:
                work(worker, job)
            except BaseException:
                stop.set()
                raise

    if workers == 1 or len(queue) <= 1:
        run(0)
        return
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="gpusync") as pool:
        running = [pool.submit(run, worker) for worker in range(workers)]
    for done in running:
        done.result()
