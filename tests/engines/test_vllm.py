"""A real vLLM server with two tensor-parallel ranks follows streams: the calls of a trainer, and what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.hf_models import llama
from support.vllm_run import Reference, Run, begin_run, make_reference
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

VERSIONS = 6
CALLERS = 50


@pytest.fixture(scope="module")
def reference(vllm_python: Path, vllm_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    return make_reference(llama(), VERSIONS, root=root, python=vllm_python, site=vllm_site, tp=2)


@pytest.fixture(scope="module")
def server(
    vllm_python: Path, vllm_site: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {"GPUSYNC_VISIBILITY_TIMEOUT_S": "0.5"}
    with VllmServer(vllm_python, reference.base, log=log, site=vllm_site, tp=2, env=env) as started:
        yield started


@pytest.fixture
def run(server: VllmServer, reference: Reference, tmp_path: Path) -> Run:
    return begin_run(server, reference, tmp_path)


def test_it_says_what_it_can_do_before_anything_was_pulled(server: VllmServer, reference: Reference) -> None:
    status, about = server.get("/weights/engine")
    assert status == 200
    assert about["message"] == "gpusync is on"
    ((first, second),) = about["ranks"]
    for rank in (first, second):
        assert rank["base_dir"] == str(reference.base)
        counted = rank["bytes_by_class"]
        assert counted["direct"] > 0
        assert (counted["cast"], counted["derived"], counted["opaque"]) == (0, 0, 0), rank["opaque"]


def test_slimes_versions_are_pulled_and_committed(run: Run) -> None:
    run.publish(*range(1, VERSIONS + 1))
    for version in range(1, VERSIONS + 1):
        told = run.update(version)
        assert told["commit_path"] == "in place"
        status = run.status()
        assert (status["live"], status["durable"], status["prepared"]) == (version, version, None)
    assert run.server.get(f"/weights/ready?version={VERSIONS}")[0] == 200
    assert run.server.get(f"/weights/ready?version={VERSIONS + 1}")[0] == 503


def test_the_publishers_versions_are_prepared_and_committed(run: Run) -> None:
    run.publish_ours(VERSIONS)
    for version in (1, 3, VERSIONS):
        before = run.server.checksums()
        status, told = run.ask("/prepare_weights", version)
        assert (status, told["prepared"], told["commit_path"]) == (200, version, "in place"), told
        assert run.server.checksums() == before
        assert run.commit(version)["report"]["commit_path"] == "in place"
        run.assert_live(version)


def test_one_call_pulls_and_commits(run: Run) -> None:
    run.publish(1, 2)
    status, told = run.ask("/pull_weights", 2, commit=True)
    assert (status, told["live"]) == (200, 2), told
    run.assert_live(2)


def test_fifty_callers_at_once_are_one_update(run: Run) -> None:
    run.publish(1)
    with ThreadPoolExecutor(CALLERS) as callers:
        replies = list(callers.map(lambda _: run.ask("/pull_weights", 1, commit=True), range(CALLERS)))
    assert {status for status, _ in replies} == {200}
    assert {told["live"] for _, told in replies} == {1}
    assert len({str(told["report"]) for _, told in replies}) == 1, "it ran more than once"
    run.assert_live(1)


def test_a_full_version_is_committed(run: Run) -> None:
    run.publish_ours(3, full_every=2)
    for version in (1, 2, 3):
        run.update(version)


def test_a_corrupt_version_is_refused_and_the_next_good_one_works(run: Run) -> None:
    run.publish(1)
    run.update(1)
    run.publish(2, checksums={"lm_head.weight": "0" * 32})
    status, told = run.ask("/pull_weights", 2)
    assert status == 400
    assert "lm_head.weight" in told["message"]
    assert told["error"]["type"][0] in ("DigestMismatchError", "PeerFailedError")
    run.assert_live(1)
    assert run.status()["prepared"] is None
    run.publish(3, base_version=1)
    run.update(3)


def test_a_version_that_is_not_there_is_named(run: Run) -> None:
    run.publish(1)
    status, told = run.ask("/pull_weights", 2)
    assert (status, told["error"]["version"]) == (400, 2)
    run.update(1)


def test_an_aborted_version_leaves_what_serves(run: Run) -> None:
    run.publish(1, 2)
    run.update(1)
    run.pull(2)
    status, told = run.server.post("/abort_weights", {"target_version": 2})
    assert (status, told["prepared"]) == (200, None), told
    assert run.server.post("/commit_weights", {"target_version": 2})[0] == 400
    run.assert_live(1)
    run.update(2)


def test_a_new_run_begins_with_version_zero(run: Run, tmp_path: Path) -> None:
    run.publish(1, 2)
    run.update(1)
    run.update(2)
    told = run.pull(0)
    assert told["live"] is None, "the weights of the run before are no version of the new one"
    again = Run(server=run.server, reference=run.reference, source=tmp_path / "again", local=run.local)
    again.publish(1, base_version=0, encoding="xor")
    assert again.update(1)["commit_path"] == "reload"
    again.publish(2)
    assert again.update(2)["commit_path"] == "in place"


def test_weights_that_something_else_has_loaded_are_noticed(run: Run) -> None:
    run.publish(1, 2)
    run.update(1)
    run.server.reload(run.reference.plain[5])
    assert run.status()["live"] is None
    assert run.server.get("/weights/ready")[0] == 503
    assert run.update(2)["commit_path"] == "reload"


def test_requests_in_flight_are_answered(run: Run) -> None:
    run.publish(1)
    lengths: list[int] = []
    generating = threading.Thread(target=lambda: lengths.append(len(run.server.tokens(200))))
    generating.start()
    run.pull(1)
    run.commit(1)
    generating.join()
    assert lengths == [200]
    run.assert_live(1)


def test_an_engine_that_was_paused_stays_so(run: Run) -> None:
    run.publish(1)
    run.pull(1)
    assert run.server.post("/pause?mode=keep")[0] == 200
    run.commit(1)
    assert run.server.get("/is_paused")[1] == {"is_paused": True}
    assert run.server.post("/resume")[0] == 200
    run.assert_live(1)


def test_a_server_that_is_started_again_catches_up(
    run: Run, vllm_python: Path, vllm_site: Path, tmp_path: Path
) -> None:
    run.publish(1, 2, 3)
    run.update(2)
    run.server.kill()
    log = tmp_path / "again.log"
    with VllmServer(vllm_python, run.reference.base, log=log, site=vllm_site, tp=2) as server:
        again = Run(server=server, reference=run.reference, source=run.source, local=run.local)
        assert again.status()["live"] is None
        again.update(3)
