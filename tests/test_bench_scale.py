"""The benchmark of growth: what does not depend on time is claimed here, and what it follows is compared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.scripts import BENCHMARKS, run_benchmark

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scaling

    return scaling


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_scale

    return bench_scale


@pytest.mark.parametrize("encoding", ["xor", "gpusync"])
def test_calls_depend_on_the_chain_alone(scaling: Any, tmp_path: Path, encoding: str) -> None:
    def calls(**options: int) -> int:
        scale = scaling.Scale(**{"nbytes": 1 << 19, "changes": 2000, "tensors": 8, **options})
        return scaling.follow(tmp_path, scale, encoding=encoding, repeats=0).operations

    assert calls() == calls(nbytes=1 << 20) == calls(changes=200) == calls(tensors=100) == 1
    assert calls(chain=3) == 3


def test_bytes_grow_with_the_changes_not_with_the_model(scaling: Any, tmp_path: Path) -> None:
    def compact(**options: int) -> int:
        scale = scaling.Scale(**{"nbytes": 1 << 19, "changes": 2000, "tensors": 8, **options})
        return scaling.follow(tmp_path, scale, encoding="xor", repeats=0).compact_bytes

    padding = 2 * 8 * 16  # every array of every tensor begins at a multiple of 16
    assert 2000 * 6 <= compact() <= 2000 * 6 + padding
    assert 2000 * 6 <= compact(nbytes=1 << 21) <= 2000 * 6 + padding
    assert 8000 * 6 <= compact(changes=8000) <= 8000 * 6 + padding


def test_a_version_changes_as_many_elements_as_it_says_in_every_tensor(scaling: Any, tmp_path: Path) -> None:
    scale = scaling.Scale(nbytes=1 << 18, changes=500, tensors=10)
    for name in ("before", "after"):
        scaling.write_base(tmp_path / name, scale)
    scaling.change(tmp_path / "after", scale, seed=1)
    before, after = (
        np.fromfile(tmp_path / name / scaling.FILE, np.uint8)[-2 * scale.elements :].view(np.uint16)
        for name in ("before", "after")
    )
    places = np.flatnonzero(before != after)
    assert len(places) == 500
    assert set((before ^ after)[places]) == {1}
    assert Counter((places // (scale.rows * scaling.COLUMNS)).tolist()).keys() == set(range(10))


def test_what_is_wrong_has_no_figure(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, models = scaling.WeightSync.flush, []

    class Watched(scaling.RowShards):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            models.append(self)

    def spoil(sync: Any, *arguments: Any) -> None:
        flush(sync, *arguments)
        next(models[0].parameters()).data[0, 0] += 1

    monkeypatch.setattr(scaling, "RowShards", Watched)
    monkeypatch.setattr(scaling.WeightSync, "flush", spoil)
    scale = scaling.Scale(nbytes=1 << 18, changes=500, tensors=4)
    with pytest.raises(ValueError, match="is wrong"):
        scaling.follow(tmp_path, scale, encoding="xor", repeats=0)


def test_every_rank_follows_and_the_slowest_counts(tmp_path: Path) -> None:
    options = ("--size=toy", "--axis=ranks", "--repeats=1", "--json", f"--work-dir={tmp_path}")
    (report,) = json.loads(run_benchmark("bench_scale.py", *options))["reports"]
    one, two, slopes = report["rows"]
    assert (one["ranks"], two["ranks"], slopes["ranks"]) == (1, 2, "slope")
    assert one["sent KB"] == 0 < two["sent KB"]
    assert one["calls"] == two["calls"] == 1
    assert all(row[name] > 0 for row in (one, two) for name in ("pull s", "reload s", "prepare s", "commit ms"))
    assert list(tmp_path.iterdir()) == []


def test_slopes_are_powers_and_claims_are_judged(bench: Any, scaling: Any) -> None:
    assert scaling.slope([(1, 5), (10, 500), (100, 50_000)]) == pytest.approx(2)
    assert scaling.slope([(1, 5)]) is None

    def followed(commit_s: float, operations: int = 1) -> Any:
        times = dict.fromkeys(scaling.TIMES, 1.0) | {"commit_s": commit_s}
        counts = dict.fromkeys(("compact_bytes", "wire_bytes", "exchanged_bytes"), 0)
        return scaling.Followed(**times, **counts, operations=operations)

    flat = bench.axis_report("size", [(10**6, followed(1.0)), (10**8, followed(1.1))], is_toy=False)
    assert any("commit over model size: slope 0.02" in note and "; held)" in note for note in flat.notes)
    steep = bench.axis_report("size", [(10**6, followed(1.0)), (10**8, followed(10.0, 2))], is_toy=False)
    assert sum("NOT HELD" in note for note in steep.notes) == 2
    assert steep.rows[-1]["commit ms"] == pytest.approx(0.5)
