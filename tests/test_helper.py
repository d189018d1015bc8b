"""The helper process: results, errors of any kind, its end and its parent's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from gpusync.errors import GpusyncError, PayloadError
from gpusync.helper import HelperEndedError, HelperProcess
from support.jobs import Die, Fail, HasTorch, Leave, Sleep, Sum


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_parents_group_is_not_its_affair(helper: HelperProcess, number: signal.Signals) -> None:
    helper.run(Sum(()))
    first = helper.pid
    assert first is not None
    assert os.getpgid(first) == first
    os.kill(first, number)
    assert helper.run(Sum((5,))) == 5
    assert helper.pid == first


def test_it_stays_in_the_session_of_its_parent(helper: HelperProcess) -> None:
    """A session of its own may be starved by the one that the engine spins in, where the kernel has autogroups."""
    helper.run(Sum(()))
    assert helper.pid is not None
    assert os.getsid(helper.pid) == os.getsid(0)


def test_one_that_dies_before_it_has_read_its_job(helper: HelperProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    helper.run(Sum(()))
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "pid", 1)  # as it was when it was looked at
        with pytest.raises(HelperEndedError, match="exit status -9"):
            helper.run(Sum((1,)))
    assert helper.run(Sum((1,))) == 1


def test_a_job_that_leaves_is_told_of_by_its_status(helper: HelperProcess) -> None:
    with pytest.raises(HelperEndedError, match="exit status 3"):
        helper.run(Leave())


SCRIPT = """
import os, sys
sys.path[:] = {path!r}
{before}
from gpusync.helper import HelperEndedError, HelperProcess
from support.jobs import Sum
helper = HelperProcess("adds")
answer = helper.run(Sum((2, 3)))
helper.close()
open({told!r}, "w").write(str(answer))
"""


class TestWhereverItsParentRuns:
    """Scripts of their own, in a directory whose files have the names of what Python's library has."""

    def run(self, tmp_path: Path, *, before: str = "", last: str | None = None, options: tuple[str, ...] = ()) -> str:
        here = tmp_path / "here"
        here.mkdir()
        for name in ("queue", "dataclasses", "signal", "gpusync"):
            (here / f"{name}.py").write_text("raise ImportError('not what was meant')\n")
        path = [each for each in sys.path if each] + ([] if last is None else [last])
        script, told = tmp_path / "script.py", tmp_path / "told"
        script.write_text(SCRIPT.format(path=path, before=before, told=os.fspath(told)))
        subprocess.run([sys.executable, *options, os.fspath(script)], cwd=here, check=True, timeout=60)
        return told.read_text()

    @pytest.mark.parametrize("option", ["-I", "-s", "-E"])
    def test_it_imports_nothing_from_the_working_directory(self, tmp_path: Path, option: str) -> None:
        assert self.run(tmp_path, options=(option,)) == "5"

    def test_the_standard_library_stays_before_what_is_installed(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, last=os.fspath(tmp_path / "here")) == "5"

    @pytest.mark.parametrize(
        "started", ["print('hello')", "import os\ndef refuse(_): raise PermissionError\nos.nice = refuse"]
    )
    def test_what_prints_as_python_starts_and_where_no_lower_priority_is_to_be_had(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path / "site"))
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(started + "\n")
        assert self.run(tmp_path) == "5"

    @pytest.mark.parametrize(
        "before",
        ["sys.path.append(None)", "import pathlib; sys.path.append(pathlib.Path('/x'))", "sys.path.append('')"],
    )
    def test_a_path_with_odd_entries(self, tmp_path: Path, before: str) -> None:
        assert self.run(tmp_path, before=before) == "5"

    @pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
    def test_without_standard_streams(self, tmp_path: Path, closed: tuple[int, ...]) -> None:
        assert self.run(tmp_path, before=f"[os.close(number) for number in {closed}]") == "5"


def test_it_ends_with_its_parent_though_a_fork_of_that_lives_on() -> None:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    parent = context.Process(target=_fork_beside_a_helper, args=(sending,))
    parent.start()
    helper, fork = receiving.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{helper}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not Path(f"/proc/{helper}").exists()
        assert Path(f"/proc/{fork}").exists()
    finally:
        os.kill(fork, signal.SIGKILL)


def _fork_beside_a_helper(told: Connection) -> None:
    helper = HelperProcess("adds")
    helper.run(Sum(()))
    fork = os.fork()
    if not fork:
        time.sleep(60)
        os._exit(0)
    told.send((helper.pid, fork))
    time.sleep(60)


def test_after_an_interrupt_here_its_answer_is_nobodys(helper: HelperProcess) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(KeyboardInterrupt):
            helper.run(Sleep(3))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert helper.run(Sum((1, 1))) == 2


def test_what_cannot_be_a_job_there_is_told(helper: HelperProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def run(self) -> None: ...

    Lost.__module__, Lost.__qualname__ = "nowhere", "Lost"
    nowhere = ModuleType("nowhere")
    vars(nowhere)["Lost"] = Lost
    monkeypatch.setitem(sys.modules, "nowhere", nowhere)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        helper.run(Lost())
    assert helper.run(Sum((1,))) == 1


def test_one_that_is_late_is_ended(helper: HelperProcess) -> None:
    began = time.monotonic()
    with pytest.raises(GpusyncError, match=r"within 1 s"):
        helper.run(Sleep(60), timeout_s=1)
    assert time.monotonic() - began < 30
    assert helper.pid is None
