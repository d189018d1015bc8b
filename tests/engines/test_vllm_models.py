"""Models of other kinds on a real vLLM server: experts, which its CPU kernels want packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.hf_models import next_state, qwen3_moe
from support.slime import publish_delta
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


def test_experts_that_a_reload_does_not_pack_again_are_never_served(
    vllm_python: Path, vllm_site: Path, tmp_path: Path
) -> None:
    model = qwen3_moe()
    publish_delta(tmp_path / "stream", 1, model.state, next_state(model.state, 1), encoding="xor")
    body = {
        "local_checkpoint_dir": str(tmp_path / "local"),
        "source_dir": str(tmp_path / "stream"),
        "target_version": 1,
    }
    base = model.write(tmp_path / "base")
    with VllmServer(vllm_python, base, log=tmp_path / "server.log", site=vllm_site, tp=2) as server:
        before = server.tokens()
        ((first, second),) = server.get("/weights/engine")[1]["ranks"]
        assert min(first["bytes_by_class"]["opaque"], second["bytes_by_class"]["opaque"]) > 0
        status, told = server.post("/pull_weights", body)
        assert (status, told["commit_path"]) == (200, "reload"), told
        assert server.tokens() == before
        status, told = server.post("/commit_weights", {"target_version": 1})
        assert status == 400
        assert "started anew" in told["message"]
        told = server.get("/weights/version")[1]
        assert (told["live"], "started anew" in str(told["in_doubt"])) == (None, True)
        assert server.get("/weights/ready")[0] == 503
        assert server.get("/is_paused")[1] == {"is_paused": True}
