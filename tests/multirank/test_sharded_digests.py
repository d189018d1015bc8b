"""Checksums of tensors that nobody holds whole, over 2 and 4 gloo processes: right, counted, and failing on all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Far above what the scenes take; a rank that hangs in a collective fails the test instead of the whole run.
TIMEOUT_S = 150

BLOCKS = 256  # whole ones of the tensor in `counted`; a half follows
SUMS_BYTES = 64


class Played:
    """What every rank saw of every scene."""

    def __init__(self, place: Path, size: int) -> None:
        self.place, self.size = place, size

    def seen(self, scene: str) -> list[dict[str, Any]]:
        return [json.loads((self.place / f"{scene}.{rank}.json").read_text()) for rank in range(self.size)]

    def sent(self, case: str, kind: str) -> list[int]:
        """Bytes by rank."""
        return [seen[case][kind] for seen in self.seen("counted")]


@pytest.fixture(scope="module", params=[2, 4])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    size: int = request.param
    place = tmp_path_factory.mktemp(f"digest{size}")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "digest")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(size):
        command = [sys.executable, str(HERE / "sharded_worker.py"), str(rank), str(size), str(place)]
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


def test_every_size_ownership_and_algorithm_equals_the_library_on_every_rank(played):
    for seen in played.seen("every_ownership_at_once"):
        assert seen["tensors"] == 13 * 5 * 3 + 2 * 3
        assert seen["wrong"] == []


def test_bytes_may_be_supplied_in_windows_that_differ_from_rank_to_rank(played):
    for rank, seen in enumerate(played.seen("through_windows")):
        assert seen["wrong"] == []
        assert seen["same traffic"] is True
        assert seen["within"] is True
        assert seen["once"] is True
        copy, failing = seen["copy"], seen["failing"]
        assert (copy["error"], copy["tensor"], copy["first_byte"]) == ("ReplicaMismatchError", "kv", 7777)
        assert (copy["rank"], copy["like_rank"]) == (played.size - 1, 0)
        assert failing["error"] == ("RuntimeError" if rank == 1 else "PeerFailedError")
        assert "the supply ran dry" in failing["text"]


def test_contiguous_ownership_passes_the_accumulator(played):
    """64 bytes from each rank to the next; sums only of the blocks that a boundary cuts, 1/16 of their bytes."""
    first = [SUMS_BYTES] * (played.size - 1) + [0]
    for case in ("rows of whole blocks", "rows at multiples of 8", "rows at odd bytes"):
        assert all(seen[case]["right"] for seen in played.seen("counted"))
        assert played.sent(case, "accumulators") == first
        # the block belongs to the rank that has its first byte, so the later one sends its sums
        cut = [0] * played.size if case == "rows of whole blocks" else first[::-1]
        assert played.sent(case, "sums") == cut
    assert played.sent("rows at multiples of 8", "words") == [0] * played.size
    # 3 bytes of each word belong to the earlier rank, which runs the chain; the later one sends its 5
    assert played.sent("rows at odd bytes", "words") == [0] + [5] * (played.size - 1)


def test_shared_blocks_exchange_a_sixteenth_of_their_bytes(played):
    """All ranks but the one that runs the chain send it 64 bytes for each of 256 blocks and the half one."""
    sums = sorted(played.sent("columns of whole words", "sums"))
    assert sums == [0] + [(BLOCKS + 1) * SUMS_BYTES] * (played.size - 1)
    assert BLOCKS * 1024 / 16 == BLOCKS * SUMS_BYTES
    # the last 64 bytes, less what that rank has of them
    assert sorted(played.sent("columns of whole words", "words")) == [0] + [64 // played.size] * (played.size - 1)
    assert played.sent("columns of whole words", "accumulators") == [0] * played.size


def test_a_tensor_on_one_rank_exchanges_only_its_digest(played):
    assert all(seen["one owner"]["right"] for seen in played.seen("counted"))
    for kind in ("sums", "accumulators", "words", "whole", "partials"):
        assert played.sent("one owner", kind) == [0] * played.size
    # a byte that says all is well, the digest on the rank that has it, 8 bytes of length; to every other rank
    other = played.size - 1
    assert played.sent("one owner", "results") == [other * 9] * other + [other * (9 + 16)]
    assert {seen["one owner"]["rounds"] for seen in played.seen("counted")} == {2}


def test_short_tensors_and_blake3_are_exchanged_whole_and_adler32_adds_up(played):
    nbytes, size = BLOCKS * 1024 + 512, played.size
    for case in ("blake3", "adler32", "short"):
        assert all(seen[case]["right"] for seen in played.seen("counted"))
    assert sorted(played.sent("blake3", "whole")) == [0] + [nbytes // size] * (size - 1)
    # the rank that puts it together has the most of it
    assert sum(played.sent("short", "whole")) < 240
    assert played.sent("adler32", "partials") == [8 * (size - 1)] * size
    assert sum(played.sent("adler32", "whole")) == 0


def test_the_number_of_rounds_does_not_grow_with_the_number_of_tensors(played):
    for seen in played.seen("many_tensors_take_as_many_rounds_as_few"):
        assert seen["right"] == [True, True]
        assert seen["rounds"] == [3, 3]


def test_equal_replicas_are_fine_and_a_differing_one_is_named_on_every_rank(played):
    last = played.size - 1
    for seen in played.seen("replicas"):
        assert seen["equal"] is True
        kv, norm = seen["kv"], seen["norm"]
        assert kv["error"] == norm["error"] == "ReplicaMismatchError"
        assert (kv["tensor"], kv["rank"], kv["like_rank"], kv["first_byte"]) == ("kv", last, last - 1, 5990)
        assert (norm["tensor"], norm["rank"], norm["like_rank"], norm["first_byte"]) == ("norm", last, 0, 7)
        assert f"rank {last} has other bytes than rank {last - 1}, first at byte 5990 in block 5" in kv["text"]


def test_a_missing_byte_is_told_on_every_rank(played):
    for seen in played.seen("faults"):
        fault = seen["a byte on no rank"]
        assert (fault["error"], fault["tensor"], fault["found"]) == ("LayoutError", "w", "none from 0 on")


def test_a_fault_of_one_rank_is_told_on_all(played):
    for rank, seen in enumerate(played.seen("faults")):
        for case, error, text in (
            ("a piece that leaves its tensor", "LayoutError", "a piece leaves its tensor"),
            ("a failure on the way", "RuntimeError", "out of memory"),
        ):
            fault = seen[case]
            assert fault["error"] == (error if rank == 1 else "PeerFailedError")
            assert text in fault["text"]
            if rank != 1:
                assert list(fault["ranks"]) == ["1"]
        different = seen["different tensors"]
        assert different["error"] == "LayoutError"
        assert different["found"] == f"others on ranks [{played.size - 1}]"
        assert seen["afterwards"] is True


def test_memory_of_a_rank_stays_within_the_budget(played):
    for seen in played.seen("memory"):
        assert seen["right"]
        # beside the budget, chunks of the numpy reference
        assert seen["peak"] < (1 << 20) + (1 << 20)
    # No block has two owners here, but 2,048 rows are too many runs: one rank gets the sums of all others' blocks.
    others = (8 << 20) * (played.size - 1) // played.size
    assert sum(seen["sums"] for seen in played.seen("memory")) == others // 16


def test_a_rank_that_is_gone_is_an_error_and_not_a_wait(played):
    for rank in range(played.size - 1):
        seen = json.loads((played.place / f"a_rank_is_gone.{rank}.json").read_text())
        assert seen["error"] == "GroupFailedError"
        assert "a rank may be gone" in seen["text"]
        assert seen["seconds"] < 30
