"""Benchmarks as they are run by hand: as files, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run_benchmark(script: str, *options: str) -> str:
    """What it printed. The checkout need not be installed; its child processes inherit the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
