"""The benchmark runs, at toy size, and verifies its own results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_kernels.py"


@pytest.mark.slow
def test_it_runs_at_toy_size():
    run = subprocess.run([sys.executable, str(BENCHMARK), "--toy"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for operation in ("plain copy", "copy", "xor", "sparse check", "xor + block sums", "cast BF16 to F32"):
        assert any(line.startswith(operation + "  ") for line in run.stdout.splitlines()), operation
