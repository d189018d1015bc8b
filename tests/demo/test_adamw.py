from __future__ import annotations

import numpy as np
import pytest
import torch

from gpusync.demo.adamw import AdamW, AdamWSettings, from_bf16, spread_in_rounding_cell, to_bf16

EVERY_BF16_WORD = np.arange(1 << 16, dtype=np.uint16)


def test_the_cast_equals_torch_on_every_word_and_around_every_rounding_boundary():
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (EVERY_BF16_WORD.astype(np.uint32)[:, None] << 16) + offsets
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    number = ~np.isnan(values)
    np.testing.assert_array_equal(to_bf16(values)[number], expected[number])
    assert np.isnan(from_bf16(to_bf16(values)[~number])).all()


def test_spread_masters_cast_back_to_their_words_exactly():
    rng = np.random.default_rng(0)
    for _ in range(20):
        masters = spread_in_rounding_cell(EVERY_BF16_WORD, rng)
        nan = np.isnan(from_bf16(EVERY_BF16_WORD))
        np.testing.assert_array_equal(to_bf16(masters)[~nan], EVERY_BF16_WORD[~nan])
        assert np.isnan(masters[nan]).all()


def test_spread_masters_fill_the_rounding_cell():
    words = np.full(10_000, to_bf16(np.array([0.02], np.float32))[0])
    masters = spread_in_rounding_cell(words, np.random.default_rng(0))
    ulp = 2.0**-13  # of a bf16 between 2^-6 and 2^-5
    distance = (masters.astype(np.float64) - from_bf16(words)) / ulp
    np.testing.assert_allclose(
        np.quantile(distance, [0.01, 0.25, 0.5, 0.75, 0.99]), [-0.49, -0.25, 0, 0.25, 0.49], atol=0.02
    )


@pytest.mark.parametrize("gradient_scale", [1e-3, 1.0], ids=["unclipped", "clipped"])
def test_ten_steps_equal_the_ones_of_torch(gradient_scale):
    rng = np.random.default_rng(5)
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {"a": (33, 7), "b": (5,)}.items()}
    gradients = [
        {name: (gradient_scale * rng.standard_normal(w.shape)).astype(np.float32) for name, w in start.items()}
        for _ in range(10)
    ]
    # A large rate, so that a wrong bias correction or decay is far outside the tolerance.
    settings = AdamWSettings(lr=1e-2)
    ours = AdamW({name: w.copy() for name, w in start.items()}, settings)
    params = {name: torch.nn.Parameter(torch.from_numpy(w.copy())) for name, w in start.items()}
    theirs = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    for gradient in gradients:
        norm = ours.step(gradient)
        for name, param in params.items():
            param.grad = torch.from_numpy(gradient[name].copy())
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(params.values(), settings.clip)), rel=1e-5)
        theirs.step()
    for name, param in params.items():
        np.testing.assert_allclose(ours.masters[name], param.detach().numpy(), rtol=1e-5, atol=1e-7)
        assert not np.allclose(ours.masters[name], start[name], atol=1e-3)


def test_an_ordinary_step_moves_every_master_by_at_most_the_rate_but_few_bf16_words():
    rng = np.random.default_rng(6)
    words = to_bf16((0.05 * rng.standard_normal(100_000)).astype(np.float32))
    optimizer = AdamW({"w": spread_in_rounding_cell(words, rng)})
    before = optimizer.masters["w"].copy()
    optimizer.step({"w": rng.standard_normal(words.size).astype(np.float32)})
    moved = np.abs(optimizer.masters["w"] - before)
    assert 0.9e-6 < np.median(moved) < 1.1e-6
    changed = np.mean(to_bf16(optimizer.masters["w"]) != words)
    assert 0.001 < changed < 0.03
