"""`test_device.py` without a GPU: Triton's interpreter has to be chosen before anything imports Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_the_device_path_is_exact_under_the_interpreter():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(HERE / "test_device.py"),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed, 1 skipped" in done.stdout
