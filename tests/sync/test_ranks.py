"""Tensor-parallel ranks follow a stream together: all of them, or none (scenes.py)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verdict.stage import KILLED, Company

from support.engines import as_state, history, publish_our_stream, publish_slime_stream
from support.models import ModelConfig
from support.slime import publish_delta

Play = Callable[..., list[Any]]
VERSIONS = 12
CHAINS = [[1], [2, 3], [4], [6, 7], [8], [], [11, 12]]  # 5 and 10 are full: nothing before them is needed


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    company = Company("sync.scenes")
    yield company
    company.close()


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, publish, tied in (
        ("slime", publish_slime_stream, False),
        ("slime, tied", publish_slime_stream, True),
        ("ours", publish_our_stream, False),
    ):
        root = found[name] = tmp_path_factory.mktemp("stream")
        publish(root, ModelConfig(tied=tied), VERSIONS)
        if tied:
            (root / "tied").touch()
    return found


@pytest.fixture
def play(company: Company, streams: dict[str, Path], tmp_path: Path) -> Play:
    def play(scene: str, size: int, *, stream: str = "slime", understudies: int = 0) -> list[Any]:
        place = tmp_path / "place"
        if not place.exists():
            shutil.copytree(streams[stream], place)
        return company.play(scene, size=size, parts=size + understudies, place=place, timeout_s=180)

    return play


@pytest.mark.parametrize("stream", ["slime", "slime, tied", "ours"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_follow_a_stream_of_every_form(play: Play, size: int, stream: str) -> None:
    expected = [["in place", chain] for chain in CHAINS]
    assert play("follow", size, stream=stream) == [{"reports": expected, "moved": False, "reloads": 0}] * size


def test_a_fault_on_one_rank_is_a_failure_on_all_and_changes_nothing(play: Play) -> None:
    seen = play("faults", 2)
    raised = {
        "out_of_memory": ("MemoryError", "the device has no memory left"),
        "launch": ("RuntimeError", "an illegal memory access was encountered"),
        "recompute": ("RuntimeError", "a derived tensor cannot be computed"),
        "flipped": ("DigestMismatchError", "live bytes are not what was verified before the commit"),
    }
    for action, (error, text) in raised.items():
        assert (seen[1][action]["error"], text in seen[1][action]["text"]) == (error, True)
        assert (seen[0][action]["error"], text in seen[0][action]["text"]) == ("PeerFailedError", True)
        assert "rank 1" in seen[0][action]["text"]
    assert [rank["reloads"] for rank in seen] == [0, 0]


@pytest.mark.parametrize("kind", ["checksum", "payload", "cut"])
def test_a_bad_version_is_refused_on_every_rank(
    play: Play, tmp_path: Path, streams: dict[str, Path], kind: str
) -> None:
    place = tmp_path / "place"
    shutil.copytree(streams["slime"], place)
    shutil.rmtree(place / "stream/weight_v000002")
    states = history(ModelConfig(), 2)
    old, new = as_state(states[1]), as_state(states[2])
    wrong: dict[str, Any] = {
        "checksum": {"checksums": {"proj.weight": "0" * 32}},
        "payload": {"payloads": {"proj.weight": np.random.default_rng(0).bytes(100)}},
        "cut": {"payloads": {"proj.weight": b""}},
    }[kind]
    publish_delta(place / "stream", 2, old, new, **wrong)
    seen = play("bad_streams", 2)
    assert [rank["version"] for rank in seen] == [1, 1]
    for rank in seen:
        assert rank["raised"]["error"] in ("DigestMismatchError", "PayloadError", "PeerFailedError")
        assert "proj.weight" in rank["raised"]["text"]


def test_a_rank_that_stalls_is_named_and_the_next_pull_works(play: Play) -> None:
    seen = play("stalls", 2)
    assert "rank 1" in seen[0]["raised"]["text"]
    assert seen[0]["seconds"] < 20
    assert seen[1]["raised"]["error"] is not None


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_after_a_rank_was_killed_the_others_hold_the_old_version(play: Play, phase: str) -> None:
    *survivors, victim, understudy = play(f"killed_in_{phase}", 2, understudies=1)
    assert victim == KILLED
    for rank in survivors:
        assert "rank 1" in rank["raised"]["text"]
        assert "rank 1" in rank["alone"]["text"]
    # The newcomer serves the base, the survivors version 1: nothing is live on all, so all of them reload.
    assert {rank["path"] for rank in (*survivors, understudy)} == {"reload"}
    assert {rank["version"] for rank in (*survivors, understudy)} == {2}


def test_a_rank_that_misses_the_decision_is_not_ready_until_it_has_learned_it(play: Play) -> None:
    sure, doubtful = play("in_doubt", 2)
    assert sure == {"commit": None, "ready": True, "doubt": False, "ready_after": True}
    assert doubtful == {"commit": "InDoubtError", "ready": False, "doubt": True, "ready_after": True}


def test_two_hosts_are_fetched_for_once_each_and_decide_together(play: Play) -> None:
    seen = play("two_hosts", 4)
    assert [rank["leaders"] for rank in seen] == [[0, 2]] * 4
    assert [rank["fetches"] for rank in seen] == [2, 0, 2, 0]
    assert seen[2]["raised"]["error"] == "VersionMissingError"
    assert {rank["raised"]["error"] for rank in (seen[0], seen[1], seen[3])} == {"PeerFailedError"}
