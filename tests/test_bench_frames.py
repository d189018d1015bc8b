"""The benchmark of frames: it says where there is no device, tells a wrong byte, and fills all columns where it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import emulated_cuda

torch = pytest.importorskip("torch", reason="torch is not installed")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_frames

    return bench_frames


def test_without_a_device_the_host_is_measured_and_no_figure_is_of_a_gpu(bench: Any) -> None:
    report = bench.frames_report(None, mib=1, toy=True)
    assert {row["frame KiB"] for row in report.rows} == {64, 128, 256, 512, 1024}
    assert {row["result"] for row in report.rows} == {"exact"}
    assert all(row["libzstd GB/s"] > 0 and "nvCOMP GB/s" not in row for row in report.rows)
    assert "decoder: libzstd, no CUDA device is used" in report.notes
    assert "nvCOMP was not run: no figure here is of a GPU" in report.notes


def test_what_a_step_changes_is_little_and_planes_are_all_of_it(bench: Any) -> None:
    data = bench.delta_bytes(bench.TOY_SHAPE)
    assert 0 < np.count_nonzero(data["xor of one step"]) < data["full planes"].size // 20


@pytest.fixture
def emulated(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as on a device whose calls the CPU plays: every line of it runs, no time means anything."""
    module = emulated_cuda.install(monkeypatch)
    from gpusync.codec.device.frames import NvcompFrameDecoder

    monkeypatch.setattr(bench, "choose_frame_decoder", lambda device: (NvcompFrameDecoder(device), "emulated"))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_: 1e12)
    return module


def test_on_a_device_every_column_is_filled(bench: Any, emulated: Any) -> None:
    report = bench.frames_report("cpu", mib=1, toy=True)
    assert all(set(row) == set(report.columns) for row in report.rows)
    assert {row["result"] for row in report.rows} == {"exact"}


def test_a_wrong_byte_has_no_time(bench: Any, emulated: Any) -> None:
    decode = emulated._decode

    def damage(srcs: list[np.ndarray], out: list[np.ndarray]) -> None:
        decode(srcs, out)
        out[-1][-1] ^= 1

    emulated._decode = damage
    for row in bench.frames_report("cpu", mib=1, toy=True).rows:
        assert row["result"] == "WRONG BYTES"
        assert not any("GB/s" in name for name in row)
