"""Encoding keeps order, bounds what is in flight, and stops at the first error."""

from __future__ import annotations

import threading
import time

import pytest

from gpusync.publish.pool import drain, map_in_order


def test_order_is_kept_and_the_iterator_stays_on_this_thread():
    threads = set()

    def items():
        for i in range(40):
            threads.add(threading.get_ident())
            yield i

    def work(i: int) -> int:
        time.sleep(0.002 * (i % 3))
        return i * i

    assert list(map_in_order(work, items(), workers=4)) == [i * i for i in range(40)]
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_than_workers_and_one_are_in_flight(workers):
    taken = most = made = 0

    def items():
        nonlocal made, most
        for i in range(20):
            made += 1
            most = max(most, made - taken)
            yield i

    for _ in map_in_order(lambda i: i, items(), workers=workers):
        taken += 1
    assert most <= workers + 1


@pytest.mark.parametrize("where", ["items", "work"])
def test_the_first_error_ends_it(where):
    done = []

    def items():
        for i in range(100):
            if where == "items" and i == 5:
                raise ZeroDivisionError
            yield i

    def work(i: int) -> int:
        if where == "work" and i == 5:
            raise ZeroDivisionError
        done.append(i)
        return i

    with pytest.raises(ZeroDivisionError):
        list(map_in_order(work, items(), workers=2))
    assert len(done) < 10


def test_drain_runs_to_the_end_and_hides_a_second_error():
    seen = []

    def items():
        yield from range(3)
        seen.append("end")
        raise ValueError

    drain(items())
    assert seen == ["end"]
