"""What a process that serves is spared while a version is prepared or folded in another of its threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from gpusync.beside import SWITCH_INTERVAL_S, YOUNG_OBJECTS, beside_serving


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


def settings() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_garbage_is_looked_for_seldom_and_the_interpreter_changes_hands_soon() -> None:
    sys.setswitchinterval(0.005)
    gc.set_threshold(700, 10, 10)
    with beside_serving():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert gc.get_threshold() == (YOUNG_OBJECTS, 10, 10)
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert gc.get_threshold() == (700, 10, 10)


def test_settings_that_go_further_stay() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S / 4)
    gc.set_threshold(2 * YOUNG_OBJECTS, 5, 5)
    before = settings()
    with beside_serving():
        assert settings() == before
    assert settings() == before


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0, 10, 10)
    with beside_serving():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_the_last_thread_that_leaves_brings_the_settings_back() -> None:
    before = settings()
    inside, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with beside_serving():
            inside.set()
            may_leave.wait(20)

    thread = threading.Thread(target=other)
    with beside_serving():
        thread.start()
        assert inside.wait(20)
        during = settings()
    assert settings() == during != before
    may_leave.set()
    thread.join(20)
    assert settings() == before


def test_an_error_brings_them_back_too() -> None:
    before = settings()
    with pytest.raises(ValueError, match="now"), beside_serving():
        raise ValueError("now")
    assert settings() == before
