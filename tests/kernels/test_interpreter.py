"""The device tests under Triton's interpreter: chosen before triton is imported, hence in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent / "device"
MODULES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != "test_bandwidth.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_interpreted(module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / module)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """All modules, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MODULES, pool.map(run_interpreted, MODULES), strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_device_tests_pass_interpreted(runs, module):
    run = runs[module]
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    summary = run.stdout.strip().splitlines()[-1]
    assert re.search(r"\d+ passed", summary), summary
    assert "skipped" not in summary, summary
