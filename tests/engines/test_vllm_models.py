"""Models of other kinds on a real vLLM server: experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.hf_models import qwen3_moe
from support.vllm_run import begin_run, make_reference
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_mixture_of_experts_is_updated(vllm_python: Path, vllm_site: Path, tmp_path: Path) -> None:
    reference = make_reference(qwen3_moe(), 2, root=tmp_path, python=vllm_python, site=vllm_site, tp=2)
    with VllmServer(vllm_python, reference.base, log=tmp_path / "server.log", site=vllm_site, tp=2) as server:
        run = begin_run(server, reference, tmp_path)
        run.publish(1, 2)
        for version in (1, 2):
            run.update(version)
