"""Several engines as one: none commits before all have prepared, and one that fails is named with its version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusync
from gpusync.endpoint.fleet import Fleet, FleetError
from gpusync.errors import DigestMismatchError, MirrorError
from support.backends import FakeBackend
from support.served import served


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, FakeBackend]]:
    backends = [FakeBackend() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        yield {stack.enter_context(served(tmp_path, backend)): backend for backend in backends}


def fleet_of(engines: dict[str, FakeBackend]) -> Fleet:
    return Fleet(list(engines), timeout=20, retry_for=0)


def live(engines: dict[str, FakeBackend]) -> list[int | None]:
    return [backend.live for backend in engines.values()]


def test_all_engines_come_to_the_version_together(engines) -> None:
    report = fleet_of(engines).pull(1)
    assert live(engines) == [1, 1, 1]
    assert report.versions == dict.fromkeys(engines, 1)
    assert all(engine.prepared and engine.committed and not engine.fenced for engine in report.engines)


def test_the_package_offers_it() -> None:
    assert gpusync.Fleet is Fleet


def test_one_that_cannot_prepare_keeps_all_from_committing(engines) -> None:
    _, bad, _ = engines
    engines[bad].failures["prepare"] = DigestMismatchError("wrong", tensor="a", version=1)
    with pytest.raises(FleetError) as caught:
        fleet_of(engines).pull(1)
    assert live(engines) == [0, 0, 0]
    assert [backend.prepared for backend in engines.values()] == [None, None, None]
    assert not any(what == "commit" for backend in engines.values() for what, _ in backend.calls)
    report = caught.value.report
    assert report.versions == dict.fromkeys(engines, 0)
    told = {engine.url: engine for engine in report.engines}
    assert isinstance(told[bad].error, DigestMismatchError)
    assert [engine.prepared for engine in report.engines] == [True, False, True]
    assert bad in str(caught.value)
    engines[bad].failures.clear()
    fleet_of(engines).pull(1)
    assert live(engines) == [1, 1, 1]


def test_one_that_fails_its_commit_is_fenced_with_every_version_told(engines) -> None:
    fleet = fleet_of(engines)
    _, bad, _ = engines
    engines[bad].failures["commit"] = MirrorError("disk full")
    with pytest.raises(FleetError) as caught:
        fleet.pull(1)
    assert live(engines) == [1, 0, 1]
    assert list(caught.value.report.versions.values()) == [1, 0, 1]
    assert list(caught.value.report.fenced) == list(fleet.fenced) == [bad]
    assert "disk full" in fleet.fenced[bad]
    assert f"{bad}: live 0, fenced" in str(caught.value)


def test_a_fenced_engine_holds_nobody_up_and_is_back_when_it_has_committed(engines) -> None:
    fleet = fleet_of(engines)
    _, bad, _ = engines
    engines[bad].failures |= {"commit": MirrorError("disk full"), "prepare": MirrorError("disk full")}
    fleet.fence(bad, "seen to be ill")
    report = fleet.pull(1)
    assert live(engines) == [1, 0, 1]
    assert list(report.fenced) == [bad]
    engines[bad].failures.clear()
    assert fleet.pull(2).fenced == {}
    assert fleet.fenced == {}
    assert live(engines) == [2, 2, 2]


def test_an_engine_that_does_not_answer_keeps_all_from_committing(engines) -> None:
    dead = "http://127.0.0.1:9"
    with pytest.raises(FleetError) as caught:
        Fleet([*engines, dead], timeout=20, retry_for=0).pull(1)
    assert live(engines) == [0, 0, 0]
    assert caught.value.report.versions == {**dict.fromkeys(engines, 0), dead: None}
    assert f"{dead}: live unknown" in str(caught.value)


def test_an_engine_that_is_there_already_commits_nothing_and_is_fine(engines) -> None:
    fleet = fleet_of(engines)
    fleet.pull(1)
    assert fleet.pull(1).versions == dict.fromkeys(engines, 1)
