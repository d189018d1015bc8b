"""The synthetic rank: every figure beside a prediction, the bytes compared, and a wrong one told without a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_rank

    return bench_rank


@pytest.fixture
def rank(bench: Any) -> Any:
    return bench.Rank(tensors=5, tensor_bytes=1 << 15, device="cpu")


def test_every_density_is_prepared_committed_and_rolled_back(bench: Any) -> None:
    report = bench.rank_report(None, nbytes=1 << 20, toy=True)
    assert {(row["form"], row["changed %"]) for row in report.rows} == {
        (form, 100 * density) for form in bench.FORMS for density in bench.DENSITIES
    }
    assert {row["result"] for row in report.rows} == {"exact"}
    assert all(row["predicted"] is not None and row["found"] is not None for row in report.rows)
    assert {row["found"] for row in report.rows if row["what"] == "calls of a commit"} == {1}
    assert "CPU tensors: no figure here is of a GPU" in report.notes


def test_what_is_held_beside_the_params_is_what_changed_and_the_scratch(bench: Any, rank: Any, tmp_path: Path) -> None:
    compact = [rank.rows(tmp_path, "xor", density, repetitions=1)[0]["compact MB"] for density in (0.01, 0.1)]
    assert compact[1] == pytest.approx(10 * compact[0], rel=0.02)
    elements = rank.nbytes // 2
    assert compact[1] == pytest.approx(0.1 * elements * 6 / 1e6, rel=0.01)  # a position and a word


@pytest.mark.parametrize(("call", "told"), [("commit", "after commit"), ("roll_back", "after roll-back")])
def test_a_wrong_byte_has_no_time_and_does_not_spoil_the_next_row(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, told: str
) -> None:
    real = getattr(rank.store, call)

    def spoil(prepared: Any) -> None:
        real(prepared)
        rank.params["t00003"].view(torch.int16)[0, 7] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(rank.store, call, spoil)
        (row,) = rank.rows(tmp_path, "xor", 0.01, repetitions=1)
    assert row["result"] == f"WRONG: `t00003` {told}"
    assert "found" not in row
    assert {row["result"] for row in rank.rows(tmp_path, "gs01", 0.01, repetitions=1)} == {"exact"}
