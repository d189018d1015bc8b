"""`bench_beside.py` with a few tensors: every phase has a row, and a turn counts where it has a part in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import BENCHMARKS, run_benchmark


def test_every_phase_has_a_row(tmp_path: Path) -> None:
    options = ["--tensors", "8", "--repeats", "1", "--work-dir", str(tmp_path), "--json"]
    (report,) = json.loads(run_benchmark("bench_beside.py", *options))["reports"]
    assert [row["while"] for row in report["rows"]] == ["idle", "prepare", "commit", "fold"]
    assert report["rows"][0]["turns"] > 10
    assert list(tmp_path.iterdir()) == []


def test_a_turn_counts_in_each_phase_that_it_has_a_part_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from bench_beside import Serving

    phases = [("short", 1.0, 1.1), ("long", 1.1, 9.0), ("after", 20.0, 21.0)]
    serving = Serving(turns=[(0.5, 1.0), (3.0, 2.0)], phases=phases)
    short, long, after = (serving.row(name) for name, _, _ in phases)
    assert (short["turns"], short["max ms"]) == (1, 1000.0)
    assert (long["turns"], long["max ms"]) == (2, 2000.0)
    assert (after["turns"], after["max ms"]) == (0, None)
