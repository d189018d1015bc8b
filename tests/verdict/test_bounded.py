"""Waiting with an end."""

from __future__ import annotations

import threading
import time

import pytest

from gpusync.verdict.bounded import Deadline, Worker, call_bounded


def test_a_deadline_ends():
    deadline = Deadline(0.05)
    assert not deadline.expired
    assert 0 < deadline.left_s() <= 0.05
    time.sleep(0.06)
    assert deadline.expired
    assert deadline.left_s() == 0


def test_a_worker_does_calls_in_turn_in_one_thread():
    worker = Worker("test-worker")
    threads = [worker.call(threading.current_thread, timeout_s=5) for _ in range(3)]
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon
    worker.close()
    threads[0].join(5)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("error", [RuntimeError("broken"), ConnectionResetError("cut"), TimeoutError("its own")])
def test_what_the_library_raises_is_raised(error):
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_bounded(work, timeout_s=5, name="test-call")
    assert caught.value is error


def test_a_call_that_does_not_return_is_left_behind():
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        call_bounded(release.wait, timeout_s=0.1, name="test-stuck")
    assert time.monotonic() - began < 2
    stuck = [thread for thread in threading.enumerate() if thread.name == "test-stuck"]
    assert [thread.daemon for thread in stuck] == [True]
    release.set()
    stuck[0].join(5)
    assert not stuck[0].is_alive()
