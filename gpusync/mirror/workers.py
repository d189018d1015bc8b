"""A few threads that share a list of jobs. The work itself (zstd, digests, numpy, file I/O) releases the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

J = TypeVar("J")

SMALL_BYTES = 256 << 10
"""Jobs of fewer bytes are mostly Python, in which threads only hinder each other."""


def for_each(jobs: Iterable[J], work: Callable[[int, J], None], *, workers: int, size: Callable[[J], int]) -> None:
    """Call `work(worker number, job)` for every job, the largest first so that the threads end together. `size`: bytes.
    One thread does the small ones.

    The first exception stops the others from taking further jobs and is raised here once all have stopped.
    """
    ordered = sorted(jobs, key=size, reverse=True)
    shared = sum(size(job) >= SMALL_BYTES for job in ordered)
    large, small = deque(ordered[:shared]), deque(ordered[shared:])
    stop = threading.Event()

    def run(worker: int, *queues: deque[J]) -> None:
        for queue in queues:
            while not stop.is_set():
                try:
                    job = queue.popleft()
                except IndexError:
                    break
                try:
                    work(worker, job)
                except BaseException:
                    stop.set()
                    raise

    if workers == 1 or shared <= 1:
        run(0, large, small)
        return
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="gpusync") as pool:
        running = [pool.submit(run, 0, small, large)]
        running += [pool.submit(run, worker, large) for worker in range(1, workers)]
    for done in running:
        done.result()
