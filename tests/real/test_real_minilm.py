"""Real weights, real steps, published and pulled by another process: every tensor equals the trainer's, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gpusync.publish import CheckpointTensors, Publisher

STEPS = 10
LAG = 3


@pytest.fixture(name="work")
def _work(tmp_path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # 150 MB a case


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
def test_ten_published_steps_arrive_bit_for_bit(trainer_run, encoding, checksum, work):
    source_dir, base_dir = work / "stream", trainer_run.checkpoints[0]
    publisher = Publisher(source_dir, base_dir=base_dir, encoding=encoding, checksum=checksum)
    for step in range(1, STEPS + 1):
        report = publisher.publish(CheckpointTensors(trainer_run.checkpoints[step]))
        assert report.version == step

    _pull(source_dir, work / "lagging", base_dir, STEPS - LAG)
    _assert_equal_to_trainer(work / "lagging", trainer_run, STEPS - LAG)
    _pull(source_dir, work / "lagging", base_dir, STEPS)
    _assert_equal_to_trainer(work / "lagging", trainer_run, STEPS)
    _pull(source_dir, work / "fresh", base_dir, STEPS)
    _assert_equal_to_trainer(work / "fresh", trainer_run, STEPS)


def _pull(source_dir: Path, local_dir: Path, base_dir: Path, version: int) -> None:
    options = {
        "--source-dir": source_dir,
        "--local-checkpoint-dir": local_dir,
        "--base-dir": base_dir,
        "--target-version": version,
    }
    arguments = [str(part) for option in options.items() for part in option]
    done = subprocess.run(
        [sys.executable, "-m", "gpusync", "pull", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((local_dir / ".weight_sync" / "state.json").read_text())["version"] == f"{version:06d}"


def _assert_equal_to_trainer(local_dir: Path, trainer_run, step: int) -> None:
    expected = trainer_run.tensors(step)
    with safe_open(local_dir / "model.safetensors", framework="pt") as pulled:
        assert set(pulled.keys()) == set(expected)
        for name, tensor in expected.items():
            found = pulled.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
    assert (local_dir / "config.json").read_bytes() == (trainer_run.checkpoints[step] / "config.json").read_bytes()
