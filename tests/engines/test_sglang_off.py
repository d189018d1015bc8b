"""A server on which gpusync has to stay off: it serves, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import sglang_fault
from support.hf_models import llama
from support.sglang_server import SglangServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


def test_one_rank_that_cannot_start_turns_it_off_on_all(sglang_python: Path, sglang_site: Path, tmp_path: Path) -> None:
    model = llama().write(tmp_path / "base")
    sglang_fault.install(sglang_site)
    log, env = tmp_path / "server.log", {"FAULT": "start", "FAULT_RANK": "1"}
    with SglangServer(sglang_python, model, log=log, site=sglang_site, tp=2, env=env) as server:
        before = server.tokens()
        about = server.get("/weights/engine")[1]
        assert not about["success"]
        assert "rank 1" in about["message"]
        assert "this rank has no room" in about["message"]
        body = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path), "target_version": 1}
        status, told = server.post("/pull_weights", body)
        assert (status, told["error"]["type"][0]) == (400, "RefusedError")
        assert "this rank has no room" in told["message"]
        assert server.post("/update_weights_from_disk", {"model_path": str(model)})[0] == 200
        assert server.tokens() == before
