"""The helper process: results, errors of any kind, its end and its parent's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gpusync.errors import GpusyncError, PayloadError
from gpusync.helper import HelperProcess
from support.jobs import Die, Fail, HasTorch, Sleep, Sum


@pytest.fixture(name="helper")
def _helper() -> Iterator[HelperProcess]:
    helper = HelperProcess("adds")
    yield helper
    helper.close()


def test_one_helper_does_one_job_after_another_whatever_is_printed(helper: HelperProcess) -> None:
    assert helper.pid is None
    assert helper.run(Sum((1, 2, 3))) == 6
    first = helper.pid
    assert helper.run(Sum(tuple(range(100_000)))) == 4_999_950_000
    assert helper.pid == first != os.getpid()


def test_it_runs_without_torch_at_a_lower_priority(helper: HelperProcess) -> None:
    assert not helper.run(HasTorch())
    assert helper.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_errors_are_raised_here_as_they_were_there(helper: HelperProcess) -> None:
    with pytest.raises(PayloadError, match="no frame") as caught:
        helper.run(Fail(is_portable=True))
    assert (caught.value.tensor, caught.value.version, caught.value.found) == ("w", 3, 2)
    with pytest.raises(GpusyncError, match="Odd: of a class that nobody else knows"):
        helper.run(Fail(is_portable=False))
    assert helper.run(Sum((1,))) == 1


def test_one_that_died_is_told_of_and_the_next_job_has_another(helper: HelperProcess) -> None:
    helper.run(Sum(()))
    first = helper.pid
    with pytest.raises(GpusyncError, match=r"the helper that adds ended before it answered.*exit status 7"):
        helper.run(Die())
    assert helper.run(Sum((4,))) == 4
    assert helper.pid != first


def test_one_that_is_late_is_ended(helper: HelperProcess) -> None:
    began = time.monotonic()
    with pytest.raises(GpusyncError, match=r"within 1 s"):
        helper.run(Sleep(60), timeout_s=1)
    assert time.monotonic() - began < 30
    assert helper.pid is None
