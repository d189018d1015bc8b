"""Waiting: which errors are waited through, how often it looks, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpusync.errors import GpusyncError, HeaderError, HookError, SourceReadError, VersionMissingError
from gpusync.stream import wait_until_visible


class Waiter:
    """A clock that sleeping moves, and a `read` that fails until `ready_s`; each look takes `look_s`."""

    def __init__(self, error: GpusyncError, *, ready_s: float = float("inf"), look_s: float = 0.0) -> None:
        self.now, self.error, self.ready_s, self.look_s = 0.0, error, ready_s, look_s
        self.log: list[str] = []
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def refresh(self) -> None:
        self.log.append("refresh")

    def read(self) -> str:
        self.log.append("read")
        self.now += self.look_s
        if self.now < self.ready_s:
            raise self.error
        return "seen"

    def wait(self, timeout_s: float, refresh: Callable[[], None] | None = None) -> str:
        return wait_until_visible(
            self.read,
            refresh=refresh or self.refresh,
            timeout_s=timeout_s,
            sleep=self.sleep,
            clock=lambda: self.now,
        )


def test_seen_at_once() -> None:
    waiter = Waiter(VersionMissingError("x"), ready_s=0.0)
    assert waiter.wait(60) == "seen"
    assert (waiter.log, waiter.sleeps) == (["refresh", "read"], [])


@pytest.mark.parametrize("kind", [VersionMissingError, SourceReadError])
def test_waits_with_growing_steps(kind: type[GpusyncError]) -> None:
    waiter = Waiter(kind("not yet"), ready_s=5.0)
    assert waiter.wait(60) == "seen"
    assert waiter.sleeps[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert set(waiter.sleeps[6:]) == {1.0}
    assert waiter.log == ["refresh", "read"] * (len(waiter.sleeps) + 1)


def test_no_time_is_one_look() -> None:
    waiter = Waiter(VersionMissingError("not yet"), ready_s=0.01)
    with pytest.raises(VersionMissingError):
        waiter.wait(0)
    assert (waiter.log, waiter.sleeps) == (["refresh", "read"], [])


def test_gives_up_with_the_last_error_after_a_last_look_at_the_deadline() -> None:
    error = VersionMissingError("not yet", version=3)
    waiter = Waiter(error)
    with pytest.raises(VersionMissingError) as caught:
        waiter.wait(2.0)
    assert caught.value is error
    assert waiter.now == pytest.approx(2.0)
    assert waiter.log[-1] == "read"
    seen_at_the_end = Waiter(error, ready_s=2.0)
    assert seen_at_the_end.wait(2.0) == "seen"


def test_slow_looks_count() -> None:
    waiter = Waiter(VersionMissingError("not yet"), look_s=30.0)
    with pytest.raises(VersionMissingError):
        waiter.wait(60)
    assert waiter.log.count("read") == 2


def test_other_errors_end_it_at_once() -> None:
    waiter = Waiter(HeaderError("never right"))
    with pytest.raises(HeaderError):
        waiter.wait(60)
    assert waiter.sleeps == []


def test_error_of_the_refresh_ends_it_at_once() -> None:
    waiter = Waiter(VersionMissingError("not yet"))

    def fail() -> None:
        raise HookError("volume reload failed")

    with pytest.raises(HookError):
        waiter.wait(60, refresh=fail)
    assert waiter.log == []
