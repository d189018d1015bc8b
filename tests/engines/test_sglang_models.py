"""Other models and sizes than the ones of `test_sglang`: two versions each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.hf_models import HfModel, llama, qwen3_moe
from support.sglang_run import begin_run, make_reference
from support.sglang_server import SglangServer

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("make", "tp"), [(llama, 1), (qwen3_moe, 2)])
def test_two_versions(
    make: Callable[[], HfModel], tp: int, sglang_python: Path, sglang_site: Path, tmp_path: Path
) -> None:
    reference = make_reference(make(), 2, root=tmp_path, python=sglang_python, tp=tp)
    log = tmp_path / "server.log"
    flags = ("--enable-metrics",)
    with SglangServer(sglang_python, reference.base, log=log, site=sglang_site, tp=tp, flags=flags) as server:
        run = begin_run(server, reference, tmp_path)
        run.publish_ours(2)
        for version in (1, 2):
            assert run.update(version)["commit_path"] == "in place"
        (group,) = server.get("/weights/engine")[1]["groups"]
        assert group["bytes_by_class"]["opaque"] == 0
        assert "gpusync_live_version 2.0" in server.get("/metrics/")[1]["text"]
