"""Two data-parallel engines of one real vLLM server: both are updated, and both have a say."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.hf_models import llama
from support.vllm_run import begin_run, make_reference
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

FLAGS = ("--data-parallel-size", "2")
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_every_engine_is_updated_and_has_a_say(vllm_python: Path, vllm_site: Path, tmp_path: Path) -> None:
    options = {"python": vllm_python, "site": vllm_site, "flags": FLAGS, "env": BOUND}
    reference = make_reference(llama(), 2, root=tmp_path, **options)
    assert {name.partition(":")[0] for name in reference.checksums[0]} == {"dp0", "dp1"}
    with VllmServer(model=reference.base, log=tmp_path / "server.log", **options) as server:
        run = begin_run(server, reference, tmp_path)
        assert len(server.get("/weights/engine")[1]["ranks"]) == 2
        run.publish(1)
        assert run.update(1)["commit_path"] == "in place"
        run.publish(2, checksums={"lm_head.weight": "0" * 32})
        assert run.ask("/pull_weights", 2)[0] == 400
        run.assert_live(1)
