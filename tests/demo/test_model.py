from __future__ import annotations

import numpy as np
import pytest

from gpusync.demo.model import (
    EMBEDDING,
    DecoderShape,
    loss_and_gradients,
    seeded_weights,
    tensor_shapes,
)

# Two query heads share each key head and the batch repeats tokens, so that every sum in the backward pass is exercised.
SMALL = DecoderShape(vocabulary=11, hidden=16, layers=2, heads=4, kv_heads=2, feed_forward=12)


@pytest.fixture(name="weights")
def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    # Twice the usual std, so that attention is far from uniform; norms of exactly one would hide a gain left out.
    return {
        name: 2 * w.astype(np.float64) if w.ndim == 2 else w + 0.1 * rng.standard_normal(w.shape)
        for name, w in seeded_weights(SMALL, rng).items()
    }


@pytest.fixture(name="tokens")
def _tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, SMALL.vocabulary - 1, (2, 7))


@pytest.mark.parametrize("name", tensor_shapes(SMALL))
def test_the_gradient_equals_the_numerical_derivative_along_a_random_direction(name, weights, tokens):
    direction = np.random.default_rng(3).standard_normal(weights[name].shape)
    step = 1e-6

    def loss_at(distance: float) -> float:
        return loss_and_gradients({**weights, name: weights[name] + distance * direction}, tokens, SMALL)[0]

    numerical = (loss_at(step) - loss_at(-step)) / (2 * step)
    _, gradients = loss_and_gradients(weights, tokens, SMALL)
    assert np.vdot(gradients[name], direction) == pytest.approx(numerical, rel=1e-6, abs=1e-9)


def test_attention_is_causal_so_the_probabilities_of_a_next_token_add_up_to_one(weights, tokens):
    # One token more adds one input and one target. If earlier predictions saw that input, their losses would move, and
    # the difference of the two sums would no longer be the loss of the new target alone.
    prefix = tokens[:1, :5]
    endings = [np.append(prefix, [[token]], axis=1) for token in range(SMALL.vocabulary)]
    losses = np.array([_summed_loss(weights, ending) for ending in endings]) - _summed_loss(weights, prefix)
    assert np.exp(-losses).sum() == pytest.approx(1, rel=1e-12)
    assert np.ptp(losses) > 0.1


def _summed_loss(weights, tokens) -> float:
    return loss_and_gradients(weights, tokens, SMALL)[0] * (tokens.shape[1] - 1)


def test_tokens_that_do_not_occur_have_no_embedding_gradient(weights, tokens):
    _, gradients = loss_and_gradients(weights, tokens, SMALL)
    assert not gradients[EMBEDDING][SMALL.vocabulary - 1].any()
    assert gradients[EMBEDDING][np.unique(tokens[:, :-1])].any(axis=1).all()


def test_gradient_descent_learns_a_repeating_sequence(weights):
    tokens = np.tile(np.arange(5), 4)[None, :]
    first, _ = loss_and_gradients(weights, tokens, SMALL)
    for _ in range(80):
        loss, gradients = loss_and_gradients(weights, tokens, SMALL)
        weights = {name: w - 0.05 * gradients[name] for name, w in weights.items()}
    assert loss < 0.1 < first


def test_computes_in_the_dtype_of_its_weights(tokens):
    weights = seeded_weights(SMALL, np.random.default_rng(1))
    _, gradients = loss_and_gradients(weights, tokens, SMALL)
    assert {g.dtype for g in gradients.values()} == {np.dtype(np.float32)}
    assert {name: g.shape for name, g in gradients.items()} == tensor_shapes(SMALL)
