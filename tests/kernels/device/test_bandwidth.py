"""Achieved bandwidth of every operation beside a plain device copy, printed (`pytest -m gpu -s`) and verified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "bench_kernels.py"


def test_bandwidth(device, capsys):
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    command = [sys.executable, str(BENCHMARK), "--mib", "1024"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    with capsys.disabled():
        print(f"\n{run.stdout}")
    assert run.returncode == 0, run.stderr
