"""An sglang server with two ranks dies in the middle of an update, and another one takes its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support import sglang_fault
from support.hf_models import llama
from support.sglang_run import Reference, Run, make_reference
from support.sglang_server import Reply, SglangServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    return make_reference(llama(), 3, root=root, python=sglang_python, tp=2)


def test_killed_in_a_prepare_then_in_a_commit(
    sglang_python: Path, sglang_site: Path, reference: Reference, tmp_path: Path
) -> None:
    sglang_fault.install(sglang_site)
    source, local = tmp_path / "stream", tmp_path / "local"

    @contextmanager
    def started(step: str | None) -> Iterator[tuple[Run, Path]]:
        mark = tmp_path / f"died-in-{step}"
        env = {} if step is None else {"FAULT": step, "FAULT_RANK": "1", "FAULT_MARK": str(mark)}
        log = tmp_path / f"{step}.log"
        with SglangServer(sglang_python, reference.base, log=log, site=sglang_site, tp=2, env=env) as server:
            run = Run(server=server, reference=reference, source=source, local=local)
            assert server.tokens() == reference.tokens[0], "a server starts on its base"
            yield run, mark

    with started("prepare") as (run, mark):
        run.publish(1, 2, 3)
        _expect_death(run, mark, lambda: run.ask("/pull_weights", 1))
    with started("commit") as (run, mark):
        told = run.pull(1)
        assert (told["live"], told["durable"]) == (0, 1)
        _expect_death(run, mark, lambda: run.switch(1))
    with started(None) as (run, _):
        # What was durable survived, live is the base again: one pull brings both further.
        assert run.update(2)["commit_path"] == "in place"
        run.update(3)
        assert run.status()["durable"] == 3


def _expect_death(run: Run, mark: Path, call: Callable[[], Reply]) -> None:
    """The call never succeeds. The whole server is killed then: left alone, it waits a minute for its core dumps."""
    replies: list[Reply] = []

    def ask() -> None:
        with suppress(OSError):
            replies.append(call())

    asking = threading.Thread(target=ask)
    asking.start()
    end = time.monotonic() + 60
    while time.monotonic() < end and not mark.exists():
        time.sleep(0.1)
    assert mark.exists(), "the fault did not come about"
    run.server.kill()
    asking.join()
    assert [status for status, _ in replies if status == 200] == []
