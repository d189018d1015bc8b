"""The real input is what it claims to be; `test_real_minilm.py` is about what gpusync does with it."""

from __future__ import annotations

import torch


def test_the_trainer_embeds_as_the_released_model_does(released_weights, embed_sentences):
    sentences = [
        "A man is eating food.",
        "Someone eats a meal at the table",
        "The stock market fell by two percent today.",
    ]
    embedded = embed_sentences(released_weights, sentences)
    # What sentence-transformers and transformers' BertModel give for these three (max difference 1e-7).
    expected = torch.tensor([[1.0, 0.6477, -0.0257], [0.6477, 1.0, -0.0392], [-0.0257, -0.0392, 1.0]])
    torch.testing.assert_close(embedded @ embedded.T, expected, atol=1e-4, rtol=0)


def test_every_step_changes_a_realistic_share_of_elements_mostly_by_one_unit_in_the_last_place(trainer_run):
    low, high, one_ulp = {1e-6: (0.2, 1.3, 85), 1e-5: (1.5, 7, 75)}[trainer_run.lr]
    for step in (1, 2, len(trainer_run.checkpoints) - 1):
        before, after = trainer_run.tensors(step - 1), trainer_run.tensors(step)
        distances = torch.cat([_ulps(before[name], after[name]) for name in before if before[name].is_floating_point()])
        assert low < 100 * (distances != 0).float().mean() < high, step
        assert 100 * (distances[distances != 0].abs() == 1).float().mean() > one_ulp, step
        assert torch.equal(before["embeddings.position_ids"], after["embeddings.position_ids"])


def _ulps(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return _ordered(after) - _ordered(before)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """bf16 bit patterns as integers in the order of their values."""
    words = x.flatten().view(torch.int16).int()
    return torch.where(words < 0, -(words & 0x7FFF), words)
