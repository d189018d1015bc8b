"""The mirror's benchmark runs at toy size, says what it measured, and prints nothing of a result that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpusync.errors import DigestMismatchError

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(work_dir: Path, *options: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    command = [sys.executable, str(BENCHMARKS / "bench_mirror.py"), "--size=toy", "--repeats=1", "--json"]
    done = subprocess.run(
        [*command, f"--work-dir={work_dir}", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["reports"]


def test_it_measures_arrivals_and_folds(tmp_path: Path) -> None:
    durable, folds = run(tmp_path)
    *arrivals, rival = durable["rows"]
    kinds = {"0.2% x 1", "1.0% x 1", "2.0% x 1", "5.0% x 1", "1.0% x 2", "1.0% x 4", "1.0% x 8"}
    assert {row["changed x versions"] for row in arrivals} == kinds
    assert [row["MB"] for row in arrivals] == sorted(row["MB"] for row in arrivals)
    assert all(row["over plain"] == pytest.approx(row["durable s"] / row["plain write s"]) for row in arrivals)
    sizes = {row["changed x versions"]: row["MB"] for row in arrivals}
    assert 7 < sizes["1.0% x 8"] / sizes["1.0% x 1"] < 9
    assert 4.5 < rival["MB"] < 6.5
    assert [row["versions in one fold"] for row in folds["rows"]] == [1, 2, 4, 8]
    assert folds["rows"][3]["of as many folds"] == pytest.approx(folds["rows"][3]["over one"] / 8)
    assert any("bit for bit" in note for note in folds["notes"])
    assert list(tmp_path.iterdir()) == []


def test_another_encoding_has_no_target_for_its_folds(tmp_path: Path) -> None:
    _, folds = run(tmp_path, "--encoding=gpusync")
    assert folds["title"].startswith("gpusync folds")
    assert "target for xor" in folds["notes"][0]


def test_a_wrong_result_prints_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_mirror

    def differs(found_dir: Path, expected_dir: Path) -> None:
        raise DigestMismatchError("differs", path=found_dir)

    monkeypatch.setattr(bench_mirror, "check_equal", differs)
    done = CliRunner().invoke(bench_mirror.main, ["--size=toy", "--repeats=1", f"--work-dir={tmp_path}"])
    assert isinstance(done.exception, DigestMismatchError)
    assert done.output == ""
