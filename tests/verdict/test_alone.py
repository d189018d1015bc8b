"""A group of one process, which needs no torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpusync.errors import DigestMismatchError, GpusyncError
from gpusync.verdict import OK, Group, HandshakeError, Verdict, open_group, take_step, this_host
from gpusync.verdict.alone import AloneGroup
from gpusync.verdict.ranks import RankGroup

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def group(tmp_path):
    return open_group(None, local_checkpoint_dir=tmp_path, timeout_s=1)


def test_it_is_everything_itself(group, tmp_path):
    assert (group.rank, group.size, group.leader, group.is_leader) == (0, 1, 0, True)
    assert (group.local_ranks, group.leaders) == ((0,), (0,))
    assert group.hosts.identities == (this_host(tmp_path),)
    assert (group.problem, group.in_doubt) == (None, None)


def test_its_verdict_is_the_decision(group):
    names = {group.begin("version 1", timeout_s=1) for _ in range(3)}
    assert len(names) == 3
    assert group.agree(OK, transaction="t", phase="p", timeout_s=1).ok
    decision = group.agree(Verdict.failed("bad", tensor="w"), transaction="t", phase="p", timeout_s=1)
    assert [(failure.rank, failure.message, failure.tensor) for failure in decision.failures] == [(0, "bad", "w")]
    with pytest.raises(GpusyncError, match="not in doubt"):
        group.resolve("t", "p", timeout_s=1)


def test_a_step_returns_the_result_or_raises_the_error(group):
    def fail() -> None:
        raise DigestMismatchError("differs")

    steps = {"transaction": "t", "phase": "p", "timeout_s": 1.0}
    assert take_step(group, "preparing", lambda: 7, **steps) == 7
    with pytest.raises(DigestMismatchError):
        take_step(group, "preparing", fail, **steps)


def test_exchanges_return_its_own(group):
    array = np.array([1, -(2**63)], dtype=np.int64)
    total = group.sum_int64(array, timeout_s=1)
    assert total.tolist() == array.tolist()
    assert not np.shares_memory(total, array)
    with pytest.raises(GpusyncError, match="only int64"):
        group.sum_int64(np.zeros(1), timeout_s=1)
    assert group.broadcast_bytes(b"abc", source=0, timeout_s=1) == b"abc"
    assert group.gather_bytes(memoryview(b"abc"), timeout_s=1) == [b"abc"]
    # As it would arrive from another rank.
    assert group.gather_objects({"a": (1, 2)}, timeout_s=1) == [{"a": [1, 2]}]
    assert group.traffic.nbytes == 0


def test_a_problem_keeps_it_off(tmp_path):
    with pytest.raises(HandshakeError, match="no layout"):
        open_group(None, local_checkpoint_dir=tmp_path, timeout_s=1, problem="no layout")


@pytest.mark.parametrize("implementation", [AloneGroup, RankGroup])
def test_both_groups_have_the_same_methods(implementation):
    for name, method in inspect.getmembers(Group, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(method).parameters.values())
            found = list(inspect.signature(getattr(implementation, name)).parameters.values())
            assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in expected], name


def test_it_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gpusync.verdict import OK, open_group\n"
        "group = open_group(None, local_checkpoint_dir='.', timeout_s=1)\n"
        "assert group.agree(OK, transaction='t', phase='p', timeout_s=1).ok\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
