"""A real vLLM server with one rank: as it is by default on a CPU, where it repacks linear weights, and without ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.hf_models import llama
from support.vllm_run import begin_run, make_reference
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


def test_one_rank_is_updated_in_place(vllm_python: Path, vllm_site: Path, tmp_path: Path) -> None:
    reference = make_reference(llama(), 2, root=tmp_path, python=vllm_python, site=vllm_site)
    with VllmServer(vllm_python, reference.base, log=tmp_path / "server.log", site=vllm_site) as server:
        run = begin_run(server, reference, tmp_path)
        run.publish(1, 2)
        assert [run.update(version)["commit_path"] for version in (1, 2)] == ["in place", "in place"]


def test_repacked_weights_are_committed_by_a_reload(vllm_python: Path, vllm_site: Path, tmp_path: Path) -> None:
    reference = make_reference(llama(), 2, root=tmp_path, python=vllm_python, site=vllm_site, plain=False)
    log = tmp_path / "server.log"
    with VllmServer(vllm_python, reference.base, log=log, site=vllm_site, plain=False) as server:
        ((rank,),) = server.get("/weights/engine")[1]["ranks"]
        assert rank["bytes_by_class"]["opaque"] > 0
        run = begin_run(server, reference, tmp_path)
        run.publish(1, 2)
        assert [run.update(version)["commit_path"] for version in (1, 2)] == ["reload", "reload"]


def test_workers_without_the_extension_are_not_called(vllm_python: Path, vllm_site: Path, tmp_path: Path) -> None:
    model = llama().write(tmp_path / "base")
    flags = ("--middleware", "gpusync.engines.vllm.Middleware")
    log = tmp_path / "server.log"
    with VllmServer(vllm_python, model, log=log, site=vllm_site, ours=False, flags=flags) as server:
        about = server.get("/weights/engine")[1]
        assert not about["success"]
        assert "--worker-extension-cls" in about["message"]
        body = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path), "target_version": 1}
        status, told = server.post("/pull_weights", body)
        assert (status, told["error"]["type"][0]) == (400, "RefusedError")
        assert "--worker-extension-cls" in told["message"]
        assert len(server.tokens()) == 16
