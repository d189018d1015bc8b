"""Which updates run, in which order, and what those who wait for them are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpusync.endpoint import AbortRequest, CommitRequest, PullRequest, Roots, Service, UpdateTimeoutError
from gpusync.endpoint import service as module
from gpusync.errors import DigestMismatchError, RefusedError
from support.backends import FakeBackend

Scenario = Callable[[Service, FakeBackend], Awaitable[None]]


def serve(tmp_path: Path, scenario: Scenario, **options: float) -> None:
    async def run() -> None:
        backend = FakeBackend()
        service = Service(backend, roots=Roots(source=(tmp_path,), local=(tmp_path,)), **options)
        await asyncio.wait_for(scenario(service, backend), 20)

    asyncio.run(run())


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., PullRequest]:
    def ask(version: int, *, commit: bool = False, source: str = "stream") -> PullRequest:
        return PullRequest(
            target_version=version,
            source_dir=str(tmp_path / source),
            local_checkpoint_dir=str(tmp_path / "local"),
            commit=commit,
        )

    return ask


async def settled() -> None:
    """Until everything that can run has run into what it waits for; directories are resolved in threads."""
    await asyncio.sleep(0.2)


def test_fifty_pulls_of_one_target_at_once_are_one_update_and_all_are_answered(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        backend.gate.clear()
        pulls = [asyncio.ensure_future(service.pull(ask(1))) for _ in range(50)]
        await settled()
        backend.gate.set()
        outcomes = await asyncio.gather(*pulls)
        assert backend.calls == [("prepare", 1)]
        assert [outcome.status.prepared for outcome in outcomes] == [1] * 50

    serve(tmp_path, scenario)


def test_a_failed_update_fails_for_all_who_share_it_and_the_next_one_starts_anew(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        backend.gate.clear()
        backend.failures["prepare"] = DigestMismatchError("wrong", version=1)
        pulls = [asyncio.ensure_future(service.pull(ask(1))) for _ in range(5)]
        await settled()
        backend.gate.set()
        results = await asyncio.gather(*pulls, return_exceptions=True)
        assert [type(result) for result in results] == [DigestMismatchError] * 5
        backend.failures.clear()
        assert (await service.pull(ask(1))).status.prepared == 1

    serve(tmp_path, scenario)


def test_different_targets_run_one_after_the_other_and_each_is_answered(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        outcomes = await asyncio.gather(*(service.pull(ask(version, commit=True)) for version in range(1, 6)))
        assert [outcome.status.live for outcome in outcomes] == [1, 2, 3, 4, 5]
        assert backend.most_at_once == 1
        assert sorted(backend.calls) == sorted(
            (what, version) for version in range(1, 6) for what in ("prepare", "commit")
        )

    serve(tmp_path, scenario)


def test_a_prepare_beside_a_pull_of_the_same_target_does_not_commit_and_the_pull_does(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        prepared, pulled = await asyncio.gather(service.pull(ask(1)), service.pull(ask(1, commit=True)))
        assert (prepared.message, pulled.message) == ("prepared", "committed")
        assert backend.live == 1

    serve(tmp_path, scenario)


def test_a_commit_waits_for_its_turn_behind_a_prepare(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        backend.gate.clear()
        pull = asyncio.ensure_future(service.pull(ask(3)))
        await settled()
        commit = asyncio.ensure_future(service.commit(CommitRequest(target_version=3)))
        await settled()
        assert backend.live == 0
        assert service.running == "preparing version 3"
        backend.gate.set()
        await pull
        assert (await commit).status.live == 3

    serve(tmp_path, scenario)


def test_committing_what_is_not_prepared_is_refused_and_committing_twice_is_once(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        with pytest.raises(RefusedError):
            await service.commit(CommitRequest(target_version=1))
        await service.pull(ask(1))
        for _ in range(2):
            assert (await service.commit(CommitRequest(target_version=1))).status.live == 1

    serve(tmp_path, scenario)


class TestNothingHangs:
    def test_a_dead_filesystem_is_a_time_out_that_names_its_path(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            backend.gate.clear()
            with pytest.raises(UpdateTimeoutError) as caught:
                await service.pull(ask(1))
            assert caught.value.path == str(tmp_path / "stream")
            assert str(tmp_path / "stream") in caught.value.found

        serve(tmp_path, scenario, timeout_s=0.5)

    def test_others_are_told_what_they_waited_behind_and_are_not_run_behind_their_backs(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            backend.gate.clear()
            results = await asyncio.gather(
                service.pull(ask(1)), service.pull(ask(2, source="other")), return_exceptions=True
            )
            stages = sorted(str(result.found) for result in results)  # type: ignore[union-attr]
            assert "reading" in stages[0]
            assert "behind preparing version" in stages[1]
            backend.gate.set()
            await settled()
            assert len(backend.calls) == 1
            assert (await service.pull(ask(3))).status.prepared == 3

        serve(tmp_path, scenario, timeout_s=0.5)

    def test_asking_again_joins_what_still_runs(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            backend.gate.clear()
            with pytest.raises(UpdateTimeoutError):
                await service.pull(ask(1))
            again = asyncio.ensure_future(service.pull(ask(1)))
            await settled()
            backend.gate.set()
            assert (await again).status.prepared == 1
            assert backend.calls == [("prepare", 1)]

        serve(tmp_path, scenario, timeout_s=0.5)

    def test_a_pull_that_nobody_waits_for_any_more_is_prepared_and_never_committed(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            backend.gate.clear()
            with pytest.raises(UpdateTimeoutError):
                await service.pull(ask(1, commit=True))
            backend.gate.set()
            await settled()
            assert (backend.live, backend.prepared) == (0, 1)

        serve(tmp_path, scenario, timeout_s=0.5)

    def test_a_link_into_a_dead_filesystem_holds_nobody_else_up(self, tmp_path, ask, monkeypatch) -> None:
        real, stuck = module.confine, threading.Event()

        def confine(path: str, roots: object, *, places: object = (), what: str) -> Path:
            if path.endswith("/dead"):
                stuck.wait(20)
            return real(path, roots, places=places, what=what)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "confine", confine)

        async def scenario(service: Service, backend: FakeBackend) -> None:
            dead = asyncio.ensure_future(service.pull(ask(1, source="dead")))
            await asyncio.sleep(0.05)
            assert (await service.pull(ask(2))).status.prepared == 2
            with pytest.raises(UpdateTimeoutError) as caught:
                await dead
            assert caught.value.path == str(tmp_path / "dead")
            assert caught.value.found == "resolving the directories"
            stuck.set()

        serve(tmp_path, scenario, timeout_s=0.5)

    def test_a_dead_filesystem_keeps_one_thread_however_often_it_is_asked_for(self, tmp_path, ask, monkeypatch) -> None:
        looks, release = [], threading.Event()

        def confine(path: str, roots: object, *, places: object = (), what: str) -> Path:
            looks.append(path)
            release.wait(20)
            return Path(path)

        monkeypatch.setattr(module, "confine", confine)

        async def scenario(service: Service, backend: FakeBackend) -> None:
            for version in range(1, 4):
                with pytest.raises(UpdateTimeoutError):
                    await service.pull(ask(version))
            assert looks == [str(tmp_path / "stream")]
            release.set()

        serve(tmp_path, scenario, timeout_s=0.2)


class TestPreparedState:
    def test_it_expires(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            await service.pull(ask(1))
            await asyncio.sleep(0.6)
            assert backend.prepared is None

        serve(tmp_path, scenario, prepared_ttl_s=0.3)

    def test_a_newer_one_is_not_dropped_for_an_older_one(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            await service.pull(ask(1))
            await asyncio.sleep(0.4)
            await service.pull(ask(2))
            await asyncio.sleep(0.4)
            assert backend.prepared == 2

        serve(tmp_path, scenario, prepared_ttl_s=0.6)

    def test_abort_drops_the_version_it_names_and_no_other(self, tmp_path, ask) -> None:
        async def scenario(service: Service, backend: FakeBackend) -> None:
            await service.pull(ask(2))
            await service.abort(AbortRequest(target_version=1))
            assert backend.prepared == 2
            await service.abort(AbortRequest())
            assert backend.prepared is None

        serve(tmp_path, scenario)


def test_ready_means_live_and_known_and_not_being_changed(tmp_path, ask) -> None:
    async def scenario(service: Service, backend: FakeBackend) -> None:
        assert service.is_ready()
        assert service.is_ready(0)
        assert not service.is_ready(1)
        await service.pull(ask(1))
        assert not service.is_ready(1)
        await service.commit(CommitRequest(target_version=1))
        assert service.is_ready(1)
        backend.in_doubt = "the decision on version 2 is not known"
        assert not service.is_ready(1)
        backend.in_doubt, backend.live = None, None
        assert not service.is_ready()

    serve(tmp_path, scenario)
