"""Jobs that threads share: each done once, the small ones by one thread, and an error stops all."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from gpusync.mirror import workers
from gpusync.mirror.workers import for_each

SMALL = 1000


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SMALL_BYTES", SMALL)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[], [1], [SMALL], [1, 2, 3], [SMALL] * 9, [SMALL - 1, SMALL, SMALL + 1, *range(50)]])
def test_every_job_is_done_once(count: int, sizes: list[int]) -> None:
    done: list[int] = []
    for_each(range(len(sizes)), lambda _, job: done.append(job), workers=count, size=sizes.__getitem__)
    assert sorted(done) == list(range(len(sizes)))


def test_large_jobs_run_side_by_side_and_one_thread_does_the_small_ones() -> None:
    meet = threading.Barrier(3, timeout=60)
    found: dict[int, set[int]] = defaultdict(set)

    def work(worker: int, size: int) -> None:
        found[size].add(worker)
        if size == SMALL:
            meet.wait()  # three of them are under way at once

    for_each([SMALL] * 3 + [1] * 40, work, workers=3, size=int)
    assert found[SMALL] == {0, 1, 2}
    assert found[1] == {0}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("failing", [2, SMALL])
def test_an_error_is_raised_and_its_thread_takes_no_more(count: int, failing: int) -> None:
    done: dict[int, list[int]] = defaultdict(list)

    def work(worker: int, size: int) -> None:
        done[worker].append(size)
        if size == failing:
            raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        for_each([1] * 300 + [failing] + [SMALL + 1] * 4, work, workers=count, size=int)
    assert [each[-1] for each in done.values()].count(failing) == 1
