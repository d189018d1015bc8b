from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpusync.demo.adamw import AdamWSettings
from gpusync.demo.checkpoints import write_checkpoint
from gpusync.demo.model import DecoderShape, tensor_shapes
from gpusync.demo.trainers import DEMO_SHAPE, DecoderTrainer, NoiseTrainer, Trainer
from gpusync.errors import UnsupportedFormatError
from gpusync.stream import read_checkpoint
from gpusync.stream.writer import ShardEntry

SMALL = DecoderShape(vocabulary=64, hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=32)


def _export(trainer: Trainer) -> dict[str, np.ndarray]:
    return {entry.name: np.array(entry.data) for entry in trainer.export()}


def _changed(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    pairs = [(before[name].view(np.uint16), after[name].view(np.uint16)) for name in before]
    return sum(np.count_nonzero(a != b) for a, b in pairs) / sum(a.size for a, _ in pairs)


def test_the_demo_model_is_about_50_mb_under_hugging_face_names():
    shapes = tensor_shapes(DEMO_SHAPE)
    assert 45e6 < sum(2 * int(np.prod(dims)) for dims in shapes.values()) < 55e6
    assert shapes["model.layers.6.self_attn.k_proj.weight"] == (128, 512)


def test_a_decoder_step_changes_a_small_share_of_elements_and_the_run_repeats_with_its_seed():
    # A rate below the demo's, because the small model's weights are larger.
    trainers = [DecoderTrainer(seed=seed, settings=AdamWSettings(lr=1e-5), shape=SMALL) for seed in (3, 3, 4)]
    before = [_export(trainer) for trainer in trainers]
    losses = [trainer.step() for trainer in trainers]
    after = [_export(trainer) for trainer in trainers]
    assert 0.001 < _changed(before[0], after[0]) < 0.2
    assert losses[0] == losses[1] != losses[2]
    for name, words in after[0].items():
        np.testing.assert_array_equal(after[1][name], words)
    assert set(after[0]) == set(tensor_shapes(SMALL))


@pytest.fixture(name="checkpoint_dir")
def _checkpoint_dir(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    weights = (0.05 * rng.standard_normal((300, 100))).astype(np.float32)
    write_checkpoint(
        tmp_path / "model",
        [
            ShardEntry(
                name="w",
                dtype="BF16",
                shape=(300, 100),
                data=(weights.view(np.uint32) >> 16).astype("<u2").view(np.uint8),
            ),
            ShardEntry(name="ids", dtype="I64", shape=(4,), data=np.arange(4).view(np.uint8)),
            ShardEntry(name="empty", dtype="BF16", shape=(0, 7), data=b""),
        ],
    )
    return tmp_path / "model"


def test_noise_steps_start_from_the_checkpoint_and_go_on_from_one_another(checkpoint_dir):
    trainer = NoiseTrainer(read_checkpoint(checkpoint_dir), seed=0, settings=AdamWSettings())
    exports = [_export(trainer)]
    for _ in range(2):
        trainer.step()
        exports.append(_export(trainer))
    weights = (0.05 * np.random.default_rng(0).standard_normal((300, 100))).astype(np.float32)
    np.testing.assert_array_equal(exports[0]["w"].view(np.uint16), (weights.view(np.uint32) >> 16).ravel())
    assert 0.0005 < _changed(exports[0], exports[1]) < 0.02
    # Momentum of settled moments: two steps move further than one.
    assert _changed(exports[0], exports[2]) > _changed(exports[0], exports[1])
    np.testing.assert_array_equal(exports[2]["ids"].view(np.int64), np.arange(4))
    assert "1 tensors that are not bf16 stay unchanged" in trainer.description
    assert "noise" in trainer.description


def test_a_checkpoint_without_bf16_is_refused(tmp_path):
    write_checkpoint(tmp_path / "m", [ShardEntry(name="w", dtype="F32", shape=(1,), data=b"\0" * 4)])
    with pytest.raises(UnsupportedFormatError) as caught:
        NoiseTrainer(read_checkpoint(tmp_path / "m"), seed=0, settings=AdamWSettings())
    assert (caught.value.expected, caught.value.found) == ("BF16", "F32")
