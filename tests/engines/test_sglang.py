"""A real sglang server with two tensor-parallel ranks follows streams: the trainer's calls, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hf_models import llama
from support.sglang_run import Reference, Run, begin_run, make_reference, reload_plain
from support.sglang_server import SglangServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

VERSIONS = 6
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    return make_reference(llama(), VERSIONS, root=root, python=sglang_python, tp=2)


@pytest.fixture(scope="module")
def server(
    sglang_python: Path, sglang_site: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {"GPUSYNC_VISIBILITY_TIMEOUT_S": "0.5"}
    with SglangServer(sglang_python, reference.base, log=log, site=sglang_site, tp=2, env=env) as started:
        yield started


@pytest.fixture
def run(server: SglangServer, reference: Reference, tmp_path: Path) -> Run:
    return begin_run(server, reference, tmp_path)


def test_it_says_what_it_can_do_before_anything_was_pulled(server: SglangServer, reference: Reference) -> None:
    status, about = server.get("/weights/engine")
    assert status == 200
    assert about["message"] == "gpusync is on"
    (group,) = about["groups"]
    assert group["base_dir"] == str(reference.base)
    counted = group["bytes_by_class"]
    assert counted["direct"] > 0
    assert (counted["cast"], counted["derived"], counted["opaque"]) == (0, 0, 0)


def test_slimes_trainer_brings_six_versions(run: Run) -> None:
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
        status, told = run.server.post("/commit_weights", {"target_version": version})
        assert (status, told["live"], told["prepared"]) == (200, version, None), told
        assert told["report"]["commit_path"] == "in place"
        run.assert_live(version)


def test_one_call_pulls_and_commits(run: Run) -> None:
    run.publish(1, 2)
    status, told = run.ask("/pull_weights", 2, commit=True)
    assert (status, told["live"]) == (200, 2), told
    run.assert_live(2)


def test_a_full_version_is_followed(run: Run) -> None:
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


def test_version_zero_of_a_fresh_engine_is_nothing_to_do(run: Run) -> None:
    run.publish(1)
    told = run.pull(0)
    assert (told["live"], told["commit_path"]) == (0, "nothing")
    assert run.update(1)["commit_path"] == "in place"


def test_weights_of_another_directory_are_noticed(run: Run) -> None:
    run.publish(1, 2)
    run.update(1)
    reload_plain(run.server, run.reference.plain[5])
    assert run.status()["live"] is None
    assert run.server.get("/weights/ready")[0] == 503
    assert run.update(2)["commit_path"] == "reload"


def test_a_reload_without_anything_prepared_reads_what_is_durable(run: Run) -> None:
    run.publish(1, 2)
    run.update(1)
    run.pull(2)
    body = {"model_path": str(run.local), "weight_version": "by hand"}
    status, told = run.server.post("/update_weights_from_disk", body)
    assert status == 200, told
    run.assert_live(2, named="by hand")
    run.publish(3)
    assert run.update(3)["commit_path"] == "in place"


def test_released_weights_are_not_touched(run: Run) -> None:
    run.publish(1, 2)
    run.update(1)
    assert run.server.post("/release_memory_occupation", {"tags": ["weights"]})[0] == 200
    status, told = run.ask("/pull_weights", 2)
    assert status == 400
    assert "released" in told["message"]
    assert run.server.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    run.update(2)


def test_requests_in_flight_are_answered(run: Run) -> None:
    run.publish(1, 2, 3)
    lengths: list[int] = []
    generating = threading.Thread(target=lambda: lengths.append(len(run.server.tokens(200))))
    generating.start()
    run.pull(1)
    generating.join()
    status, told = run.server.post("/commit_weights", {"target_version": 1})
    assert (status, lengths) == (200, [200]), told
    run.assert_live(1)


def test_a_cache_that_cannot_be_flushed_is_told(run: Run) -> None:
    run.publish(1)
    run.pull(1)
    with run.server.generating(200) as rest:
        assert run.server.post("/pause_generation", {"mode": "in_place"})[0] == 200
        body = {"model_path": str(run.local), "weight_version": "1"}
        status, told = run.server.post("/update_weights_from_disk", body)
        assert run.server.post("/continue_generation", {})[0] == 200
        assert rest() > 0, "the request that ran goes on"
    assert status == 400
    assert "cache was not flushed" in told["message"]
    assert run.status()["live"] == 1
    assert run.server.post("/flush_cache", {"timeout": 10})[0] == 200
    run.assert_live(1)


def test_the_benchmark_of_serving_measures_both_phases(run: Run) -> None:
    run.publish(1)
    before = run.server.checksums()
    command = [sys.executable, str(ROOT / "benchmarks/bench_serving.py"), "--url", run.server.url, "--version=1"]
    done = subprocess.run(
        [
            *command,
            "--source-dir",
            run.source,
            "--local-checkpoint-dir",
            run.local,
            "--repeats=2",
            "--idle-s=1",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))},
    )
    assert done.returncode == 0, done.stderr
    idle, preparing = json.loads(done.stdout)["reports"][0]["rows"]
    assert (idle["while"], preparing["while"]) == ("idle", "a prepare")
    assert idle["gaps"] > 0
    assert idle["p50 ms"] <= idle["p99 ms"] <= idle["max ms"]
    assert run.status()["prepared"] is None
    assert run.server.checksums() == before
