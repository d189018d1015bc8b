"""The benchmarks run, at toy size, and what they measure on is what it claims to be."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gpusync.demo.checkpoints import check_equal
from gpusync.errors import DigestMismatchError
from gpusync.stream import OpenFiles, read_checkpoint
from support.scripts import BENCHMARKS, run_benchmark


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def _words(directory: Path) -> dict[str, np.ndarray]:
    checkpoint, words = read_checkpoint(directory), {}
    with OpenFiles() as files:
        for name, tensor in checkpoint.tensors.items():
            words[name] = np.empty(tensor.nbytes // 2, np.uint16)
            with checkpoint.open_tensor(name, files) as source:
                source.read_into(0, words[name].view(np.uint8))
    return words


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_a_synthetic_step_has_the_statistics_of_real_ones(tmp_path, density):
    import synthetic

    settings = synthetic.Settings(nbytes=synthetic.SIZES["toy"], density=density)
    elements = synthetic.write_base(tmp_path / "0", settings)
    changed = synthetic.write_next(tmp_path / "0", tmp_path / "1", settings, step=1)
    before, after = _words(tmp_path / "0"), _words(tmp_path / "1")
    assert sum(words.size for words in before.values()) == elements
    distances = np.concatenate([synthetic._ordered(after[n]) - synthetic._ordered(before[n]) for n in before])
    assert np.count_nonzero(distances) == changed
    assert changed / elements == pytest.approx(density, rel=0.1)
    assert 0.8 < np.mean(np.abs(distances[distances != 0]) == 1) < 0.95
    # Where the exponent is large a step is below one unit in the last place, and changes are rare.
    exponents = np.concatenate([(words >> 7) & 0xFF for words in before.values()])
    small, large = distances[exponents < 116], distances[(exponents >= 122) & (exponents < 126)]
    assert np.mean(small != 0) > 5 * np.mean(large != 0)


def test_a_synthetic_stream_repeats_with_its_seed_and_does_not_depend_on_the_window(tmp_path, monkeypatch):
    import synthetic

    settings = synthetic.Settings(nbytes=synthetic.SIZES["toy"])
    for name in "ab":
        synthetic.write_base(tmp_path / name, settings)
    check_equal(tmp_path / "a", tmp_path / "b")
    synthetic.write_base(tmp_path / "c", synthetic.Settings(nbytes=settings.nbytes, seed=1))
    with pytest.raises(DigestMismatchError):
        check_equal(tmp_path / "a", tmp_path / "c")
    # Rows that straddle windows keep their scale: the weights of one row have one spread, whatever the window.
    monkeypatch.setattr(synthetic, "WINDOW_ELEMENTS", 1000)
    synthetic.write_base(tmp_path / "small windows", settings)
    whole, cut = (_words(tmp_path / name)["lm_head.weight"] for name in ("a", "small windows"))
    spreads = [np.median(words.reshape(2000, 256) & 0x7FFF, axis=1) for words in (whole, cut)]
    assert np.corrcoef(*spreads)[0, 1] > 0.95


def test_bench_pull_measures_every_part_and_verifies(tmp_path):
    told = json.loads(
        run_benchmark("bench_pull.py", "--size", "toy", "--repeats", "1", "--work-dir", str(tmp_path), "--json")
    )
    (report,) = told["reports"]
    parts = {row["part"]: row for row in report["rows"]}
    assert {"read the base", "decode zstd", "xor", "digest", "write the spool", "write in place", "pull"} <= set(parts)
    others = ("floor: the sum", "pull", "pull, gpusync")
    alone = [row["wall s"] for part, row in parts.items() if part not in others and "rival" not in part]
    assert parts["floor: the sum"]["wall s"] == pytest.approx(sum(alone))
    assert 0 < parts["pull"]["anonymous MB"] < 400
    assert "pull, gpusync" in parts
    assert any("pull over floor" in note for note in report["notes"])
    assert any("bit for bit" in note for note in report["notes"])
    assert {"CPU", "RAM", "GPU", "software", "filesystem", "commit"} <= set(told["machine"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["overwrite", "gpusync"])
def test_bench_pull_has_no_floor_for_the_other_encodings(tmp_path, encoding):
    told = run_benchmark(
        "bench_pull.py", "--size=toy", "--repeats=1", f"--encoding={encoding}", "--csv", f"--work-dir={tmp_path}"
    )
    parts = [row["part"] for row in csv.DictReader(io.StringIO(told))]
    assert parts == ["pull", "rival: full reload with safetensors"]


def test_the_machine_block_has_a_box_where_the_gpu_path_is_inactive(tmp_path):
    import harness

    out = io.StringIO()
    facts = harness.machine(tmp_path)
    harness.print_machine(facts | {"GPU": "none"}, Console(file=out, width=200))
    boxed = [line for line in out.getvalue().splitlines() if harness.NO_DEVICE in line]
    assert boxed
    assert boxed[0].startswith("│")
    assert f"numpy {np.__version__}" in out.getvalue()
    out = io.StringIO()
    harness.print_machine(facts | {"GPU": "H200"}, Console(file=out, width=200))
    assert harness.NO_DEVICE not in out.getvalue()


def test_a_measure_leaves_the_warm_up_out_and_takes_the_median(monkeypatch):
    import harness

    durations = iter([100.0, 1.0, 5.0, 3.0])
    now = 0.0

    def run() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    monkeypatch.setattr(harness.time, "process_time", lambda: 2 * now)
    assert harness.measure(run, repeats=3) == harness.Timing(wall_s=3.0, cpu_s=6.0, runs=3)


def test_the_memory_of_a_watched_command_is_what_it_held(tmp_path):
    import harness

    code = "import time; held = bytearray(b'x') * 60_000_000; time.sleep(0.3); print('done')"
    printed, peak = harness.run_watched([sys.executable, "-c", code])
    assert printed == "done\n"
    assert 60e6 < peak < 150e6
    with pytest.raises(subprocess.CalledProcessError):
        harness.run_watched([sys.executable, "-c", "raise SystemExit(3)"])


def test_bench_wire_compares_encodings_on_a_stream_and_over_densities(tmp_path):
    plot = tmp_path / "sweep.png"
    options = ("--model", "demo", "--lr", "1e-5", "--no-fp8", "--sweep", "200000", "--plot", str(plot), "--json")
    streams, sweep = json.loads(run_benchmark("bench_wire.py", *options))["reports"]
    assert [row["sync"] for row in streams["rows"]] == ["0-1 bf16", "8-9 bf16", "0-8 bf16"]
    for row in streams["rows"]:
        assert 0 < row["gpusync %"] < row["xor %"] < row["overwrite %"] < 100
        assert row["of xor"] == pytest.approx(row["gpusync %"] / row["xor %"])
        assert 1 < row["of order 0"] < row["of by exponent"]
    by_density = {row["changed %"]: row for row in sweep["rows"]}
    assert by_density[0]["form"] == "unchanged"
    assert by_density[1]["chosen %"] < by_density[1]["GS01 %"] < by_density[1]["step planes %"]
    assert by_density[5]["chosen %"] == by_density[5]["GS01 %"] < by_density[5]["step planes %"]
    assert (by_density[1]["form"], by_density[5]["form"]) == ("GP01", "GS01")
    assert by_density[100]["chosen %"] == by_density[100]["step planes %"] < by_density[100]["full %"]
    assert len([note for note in sweep["notes"] if note.endswith("met)")]) == 2
    assert not plot.exists() or plot.stat().st_size > 1000


def test_bench_codec_verifies_and_compares_with_xor():
    (report,) = json.loads(run_benchmark("bench_codec.py", "--size", "toy", "--repeats", "1", "--json"))["reports"]
    rows = {row["payload"]: row for row in report["rows"]}
    assert {"xor, zstd-1", "GS01, numpy"} <= set(rows)
    ours = rows["GS01, numpy"]
    assert ours["apply, xor's over it"] == pytest.approx(rows["xor, zstd-1"]["apply s"] / ours["apply s"])
    assert any("bit for bit" in note for note in report["notes"])
