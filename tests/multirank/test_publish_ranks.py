"""Several ranks publish one version: all of them or none, each tensor once, and a fault on one is told to all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpusync import pull
from gpusync.errors import VersionMissingError
from gpusync.stream import SourceFile, read_header, read_version
from support.checkpoints import State, changed, read_state, small_state, write_checkpoint
from support.receiver import receive
from support.shortcuts import older_states

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Far above what the scenes take; a rank that hangs in a collective fails the test instead of the whole run.
TIMEOUT_S = 150


class Played:
    """What every rank saw of every scene, and the streams they left."""

    def __init__(self, place: Path, size: int) -> None:
        self.place, self.size = place, size
        self.state: State = small_state()

    def seen(self, scene: str) -> list[dict[str, Any]]:
        return [json.loads((self.place / f"{scene}.{rank}.json").read_text()) for rank in range(self.size)]

    def steps(self, scene: str) -> list[list[dict[str, Any]]]:
        """By step, then by rank."""
        return [list(step) for step in zip(*(seen["steps"] for seen in self.seen(scene)), strict=True)]

    def receive(self, scene: str, version: int) -> State:
        return receive(self.state, self.place / scene, version)

    def holders(self, scene: str, version: int) -> Counter[str]:
        """How often each tensor stands in any shard of the version's directory, indexed or not."""
        found: Counter[str] = Counter()
        for path in (self.place / scene / f"weight_v{version:06d}").glob("*.safetensors"):
            with SourceFile(path) as file:
                found.update(read_header(file).tensors.keys())
        return found


@pytest.fixture(scope="module", params=[2, 4])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    size: int = request.param
    place = tmp_path_factory.mktemp(f"ranks{size}")
    write_checkpoint(place / "base", small_state())
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(size):
        command = [sys.executable, str(HERE / "publish_worker.py"), str(rank), str(size), str(place)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}:\n{errors[rank]}"
    return Played(place, size)


def is_published(outcomes: list[dict[str, Any]], version: int) -> bool:
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0].get("version") == version


def test_disjoint_tensors_make_one_version(played):
    states = [changed(played.state, 1)]
    states += [changed(states[-1], 2)]
    states += [changed(states[-1], 3)]
    for number, outcomes in enumerate(played.steps("together"), start=1):
        assert is_published(outcomes, number)
        assert (outcomes[0]["offered"], outcomes[0]["ranks"]) == (7, played.size)
        assert played.receive("together", number) == states[number - 1]
    index = read_version(played.place / "together", 1).index
    assert {seen["stream_id"] for seen in played.seen("together")} == {index.stream_id}
    assert {seen["version"] for seen in played.seen("together")} == {3}
    # Every rank wrote its own files and no other.
    writers = {name.split("-")[1] for name in index.shard_bytes}
    assert writers == {f"{rank:05d}" for rank in range(played.size)}
    full = read_version(played.place / "together", 2)
    assert read_state(full.path) == states[1]
    assert (full.path / "config.json").exists()


def test_rank_0_may_offer_nothing(played):
    (outcomes,) = played.steps("rank_0_offers_nothing")
    assert is_published(outcomes, 1)
    expected = changed(played.state, 1)
    received = played.receive("rank_0_offers_nothing", 1)
    assert {n: t for n, t in received.items() if n.startswith("layer")} == {
        n: t for n, t in expected.items() if n.startswith("layer")
    }
    assert received["step"] == played.state["step"]


def test_what_all_ranks_offer_is_stored_once(played):
    for version, outcomes in enumerate(played.steps("same_tensors_everywhere"), start=1):
        assert is_published(outcomes, version)
        assert played.receive("same_tensors_everywhere", version) == changed(played.state, version)
        held = played.holders("same_tensors_everywhere", version)
        assert set(held.values()) == {1}
        assert len(held) == len(played.state) - (version < 3)
        stored = read_version(played.place / "same_tensors_everywhere", version)
        assert outcomes[0]["wire_bytes"] == stored.wire_bytes
        # Names of a dict are known beforehand: the work is spread. Of an iterator's, the first rank's are kept.
        writers = {name.split("-")[1] for name in stored.index.shard_bytes}
        assert (len(writers) > 1) == (version == 1)


def test_different_bytes_for_one_tensor_are_an_error_on_all(played):
    refused, retried = played.steps("different_bytes")
    for outcome in refused:
        assert outcome["error"] == "PublishError"
        assert outcome["tensor"] == "layer.1.weight"
        assert f"and {played.size - 1} offer different bytes" in outcome["text"]
    assert [seen["left"] for seen in played.seen("different_bytes")] == [[]] * played.size
    assert is_published(retried, 1)
    assert played.receive("different_bytes", 1) == changed(played.state, 1)


@pytest.mark.parametrize(("scene", "last"), [("hook_fails_on_one_rank", True), ("hook_fails_after_the_index", False)])
def test_a_hook_that_fails_on_one_rank_fails_the_version_on_all(played, scene, last):
    failed, retried = played.steps(scene)
    at_fault = played.size - 1 if last else 0
    for rank, outcome in enumerate(failed):
        assert "volume commit failed" in outcome["text"]
        assert outcome["error"] == ("HookError" if rank == at_fault else "PeerFailedError")
        if rank != at_fault:
            assert list(outcome["ranks"]) == [str(at_fault)]
    for rank, seen in enumerate(played.seen(scene)):
        assert (seen["left"], seen["version"]) == ([], 0)
        expected = [False, False] if last or rank else [False, True, False]
        assert seen["hook_saw_index"] == expected + ([True] if rank == 0 else [])
    assert is_published(retried, 1)
    assert played.receive(scene, 1) == changed(played.state, 1)


def test_a_rank_that_fails_does_not_leave_the_others_in_its_iterator(played):
    failed, retried = played.steps("gathering_iterator")
    assert [outcome["error"] for outcome in failed] == [
        "PublishError" if rank == 1 else "PeerFailedError" for rank in range(played.size)
    ]
    assert "not a tensor" in failed[0]["ranks"]["1"]
    assert is_published(retried, 1)
    assert played.receive("gathering_iterator", 1) == changed(played.state, 1)


def test_a_tensor_may_move_from_rank_to_rank(played, tmp_path):
    for version, outcomes in enumerate(played.steps("a_tensor_moves_to_another_rank"), start=1):
        assert is_published(outcomes, version)
    source = played.place / "a_tensor_moves_to_another_rank"
    local = tmp_path / "local"
    pull(local_checkpoint_dir=local, base_dir=played.place / "base", source_dir=source, target_version=3)
    assert read_state(local) == changed(played.state, 3)


def test_ranks_have_to_want_the_same(played):
    refused, published, again = played.steps("ranks_that_want_different_things")
    assert {outcome["error"] for outcome in refused} == {"PublishError"}
    assert all("different things" in outcome["text"] for outcome in refused)
    assert is_published(published, 7)
    assert all("only go up" in outcome["text"] for outcome in again)


def test_all_ranks_resume_one_stream(played):
    for version, outcomes in enumerate(played.steps("resumed"), start=1):
        assert is_published(outcomes, version)
    assert all(seen["same_stream"] for seen in played.seen("resumed"))
    assert played.receive("resumed", 2) == changed(changed(played.state, 1), 2)


def test_a_delta_on_an_older_version(played, tmp_path):
    """Receivers there, at the newest and at nothing reach it; a failure on one rank leaves all where they were."""
    states = older_states(played.state)
    scene = "on_an_older_version"
    for version, outcomes in enumerate(played.steps(scene), start=1):
        assert is_published(outcomes, version)
        assert played.receive(scene, version) == states[version]
    for seen in played.seen(scene):
        different, failed = seen["refused"]
        assert "different things" in different["text"]
        assert "volume commit failed" in failed["text"]
        assert (seen["left"], seen["version"]) == (False, 2)
    source = played.place / scene
    assert [read_version(source, v).index.base_version for v in range(1, 7)] == [0, 1, 1, 1, 4, 2]
    for held, target, seed in (
        (1, 3, "store"),
        (2, 3, "base"),
        (None, 3, "base"),
        (4, 5, "store"),
        (2, 6, "store"),
        (5, 6, "base"),
    ):
        local = tmp_path / f"{held}-{target}"
        place = {"local_checkpoint_dir": local, "base_dir": played.place / "base", "source_dir": source}
        if held is not None:
            pull(**place, target_version=held)
        assert pull(**place, target_version=target).seed == seed
        assert read_state(local) == states[target]


def test_a_wrong_setting_on_one_rank_stops_all(played):
    (outcomes,) = played.steps("a_setting_that_is_wrong_on_one_rank")
    assert [outcome["error"] for outcome in outcomes] == [
        "PublishError" if rank == 1 else "PeerFailedError" for rank in range(played.size)
    ]


def test_survivors_of_a_rank_that_died_are_told_and_leave_nothing(played):
    assert not (played.place / f"a_rank_dies.{played.size - 1}.json").exists()
    for rank in range(played.size - 1):
        seen = json.loads((played.place / f"a_rank_dies.{rank}.json").read_text())
        assert (seen["error"], seen["left"], seen["version"]) == ("GroupFailedError", [], 0)
        assert "a rank may be gone" in seen["text"]
    with pytest.raises(VersionMissingError):
        read_version(played.place / "a_rank_dies", 1)


def test_nothing_takes_long(played):
    """A rank that waited for another until a time-out would show here."""
    for scene in ("gathering_iterator", "hook_fails_on_one_rank", "a_setting_that_is_wrong_on_one_rank"):
        assert max(seen["seconds"] for seen in played.seen(scene)) < 30
