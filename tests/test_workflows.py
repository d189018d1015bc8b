"""The workflows run what is here: the same script as by hand, the tests and the check that need a device."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_actions_are_pinned_by_major_version() -> None:
    used = [line for text in WORKFLOWS.values() for line in re.findall(r"uses: (\S+)", text)]
    assert len(used) >= 5
    assert [line for line in used if not re.fullmatch(r"actions/[\w-]+@v\d+", line)] == []


def test_every_file_that_is_run_is_there() -> None:
    run = [path for text in WORKFLOWS.values() for path in re.findall(r"(?:\.ci/|benchmarks/)\w+(?:\.py)?", text)]
    assert {".ci/run", "benchmarks/gpu_check.py"} <= set(run)
    assert [path for path in run if not (ROOT / path).exists()] == []


def test_the_gpu_job_runs_on_our_runners_and_keeps_what_the_check_prints() -> None:
    text = WORKFLOWS["gpu"]
    assert "runs-on: [self-hosted, gpu]" in text
    assert "pytest -m gpu" in text
    (printed,) = re.findall(r"benchmarks/gpu_check\.py.*\| tee (\S+)", text)
    (uploaded,) = re.findall(r"path: (\S+)", text)
    assert printed.startswith(uploaded)
    # Without it a wrong byte would be lost in the pipe.
    assert "shell: bash" in text
