"""`bench_sync.py` at toy size: the live params are right both ways, and the table has every row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("encoding", ["xor", "gpusync"])
def test_bench_sync_takes_a_version_both_ways(tmp_path: Path, encoding: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    options = [
        "--size",
        "toy",
        "--repeats",
        "1",
        "--encoding",
        encoding,
        "--slime-steps",
        "--work-dir",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bench_sync.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["reports"]
    parts = [row["part"].strip() for row in report["rows"]]
    assert parts[:6] == [
        "(a) pull to disk",
        "(a) the same by slime's own steps",
        "(a) reload of all tensors: the pause",
        "(a) sum",
        "(a) sum by slime's own steps",
        "(b) prepare, beside serving",
    ]
    assert parts[-2:] == ["(b) commit: the pause", "(b) sum"]
    assert any("commit path: in place" in note for note in report["notes"])
    assert list(tmp_path.iterdir()) == []
