"""`test_rank_device.py` without a GPU: Triton's interpreter has to be chosen before anything imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_a_rank_on_a_device_is_exact_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / "test_rank_device.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
