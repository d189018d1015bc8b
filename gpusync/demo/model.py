"""A decoder-only language model in plain numpy, forward and backward.

The shape of the Llama family: token embedding, pre-norm blocks of causal grouped-query attention with rotary positions
and a SwiGLU, a final norm and an output head, under the names a Hugging Face checkpoint gives them. It exists so that
the demo's gradients are real without torch; it is written to be read, not to be fast. Every `_x` comes with its
`_x_backward`, which takes the gradient of the output and what `_x` kept, and `tests/demo/test_model.py` checks the
whole against numerical differentiation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Tokens = npt.NDArray[np.int64]
Weights = Mapping[str, Floats]
Gradients = dict[str, Floats]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_NORM_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """`hidden` is divisible by `heads`, the quotient by 2, and `heads` by `kv_heads`."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def tensor_shapes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in checkpoint order. Matrices are [out, in], as in Hugging Face files."""
    kv_width = shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        block = _block(layer)
        shapes |= {
            f"{block}.input_layernorm.weight": (shape.hidden,),
            f"{block}.self_attn.q_proj.weight": (shape.hidden, shape.hidden),
            f"{block}.self_attn.k_proj.weight": (kv_width, shape.hidden),
            f"{block}.self_attn.v_proj.weight": (kv_width, shape.hidden),
            f"{block}.self_attn.o_proj.weight": (shape.hidden, shape.hidden),
            f"{block}.post_attention_layernorm.weight": (shape.hidden,),
            f"{block}.mlp.gate_proj.weight": (shape.feed_forward, shape.hidden),
            f"{block}.mlp.up_proj.weight": (shape.feed_forward, shape.hidden),
            f"{block}.mlp.down_proj.weight": (shape.hidden, shape.feed_forward),
        }
    return shapes | {FINAL_NORM: (shape.hidden,), HEAD: (shape.vocabulary, shape.hidden)}


def seeded_weights(shape: DecoderShape, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Gaussian matrices that keep the scale of their input, norms of one: where a training run starts."""
    return {
        name: np.ones(dims, np.float32)
        if len(dims) == 1
        else rng.standard_normal(dims, np.float32) * np.float32(dims[-1] ** -0.5)
        for name, dims in tensor_shapes(shape).items()
    }


def loss_and_gradients(weights: Weights, tokens: Tokens, shape: DecoderShape) -> tuple[float, Gradients]:
    """Mean next-token cross-entropy in nats of `tokens` [batch, length], and its gradient for every tensor.

    Computes in the dtype of `weights` (all alike).
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rotation = _rotation(inputs.shape[1], shape.head_dim, weights[EMBEDDING].dtype)
    gradients: Gradients = {}

    x = weights[EMBEDDING][inputs]
    kept = []
    for layer in range(shape.layers):
        x, kept_here = _layer(x, weights, _block(layer), shape, rotation)
        kept.append(kept_here)
    normed, kept_norm = _rms_norm(x, weights[FINAL_NORM])
    loss, d_logits = _cross_entropy(normed @ weights[HEAD].T, targets)

    d_normed = _matmul_backward(gradients, HEAD, d_logits, normed, weights)
    dx = _rms_norm_backward(gradients, FINAL_NORM, d_normed, kept_norm)
    for layer in reversed(range(shape.layers)):
        dx = _layer_backward(gradients, dx, kept.pop(), weights, _block(layer), shape, rotation)
    gradients[EMBEDDING] = np.zeros_like(weights[EMBEDDING])
    np.add.at(gradients[EMBEDDING], inputs, dx)
    return loss, gradients


def _block(layer: int) -> str:
    return f"model.layers.{layer}"


@dataclass(frozen=True, slots=True)
class _KeptNorm:
    scaled: Floats  # x / rms
    inverse_rms: Floats  # [..., 1]
    gain: Floats


@dataclass(frozen=True, slots=True)
class _KeptAttention:
    x: Floats
    q: Floats  # [batch, kv_heads, group, length, head_dim], rotated
    k: Floats  # [batch, kv_heads, 1, length, head_dim], rotated
    v: Floats
    share: Floats  # softmax of the scores [batch, kv_heads, group, length, length]
    mixed: Floats  # [batch, length, hidden], before o_proj


@dataclass(frozen=True, slots=True)
class _KeptFeedForward:
    x: Floats
    gate: Floats
    up: Floats


@dataclass(frozen=True, slots=True)
class _KeptLayer:
    input_norm: _KeptNorm
    attention: _KeptAttention
    post_norm: _KeptNorm
    feed_forward: _KeptFeedForward


def _layer(
    x: Floats, weights: Weights, block: str, shape: DecoderShape, rotation: tuple[Floats, Floats]
) -> tuple[Floats, _KeptLayer]:
    normed, input_norm = _rms_norm(x, weights[f"{block}.input_layernorm.weight"])
    change, attention = _attention(normed, weights, f"{block}.self_attn", shape, rotation)
    x = x + change
    normed, post_norm = _rms_norm(x, weights[f"{block}.post_attention_layernorm.weight"])
    change, feed_forward = _feed_forward(normed, weights, f"{block}.mlp")
    return x + change, _KeptLayer(input_norm, attention, post_norm, feed_forward)


def _layer_backward(
    gradients: Gradients,
    dx: Floats,
    kept: _KeptLayer,
    weights: Weights,
    block: str,
    shape: DecoderShape,
    rotation: tuple[Floats, Floats],
) -> Floats:
    d_normed = _feed_forward_backward(gradients, dx, kept.feed_forward, weights, f"{block}.mlp")
    dx = dx + _rms_norm_backward(gradients, f"{block}.post_attention_layernorm.weight", d_normed, kept.post_norm)
    d_normed = _attention_backward(gradients, dx, kept.attention, weights, f"{block}.self_attn", shape, rotation)
    return dx + _rms_norm_backward(gradients, f"{block}.input_layernorm.weight", d_normed, kept.input_norm)


def _matmul_backward(gradients: Gradients, name: str, d_out: Floats, x: Floats, weights: Weights) -> Floats:
    """For `out = x @ weights[name].T`: files the weight's gradient, returns the one of `x`."""
    gradients[name] = _rows(d_out).T @ _rows(x)
    return d_out @ weights[name]


def _rows(x: Floats) -> Floats:
    return x.reshape(-1, x.shape[-1])


def _rms_norm(x: Floats, gain: Floats) -> tuple[Floats, _KeptNorm]:
    inverse_rms = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(_NORM_EPSILON))
    scaled = x * inverse_rms
    return scaled * gain, _KeptNorm(scaled, inverse_rms, gain)


def _rms_norm_backward(gradients: Gradients, name: str, d_out: Floats, kept: _KeptNorm) -> Floats:
    gradients[name] = _rows(d_out * kept.scaled).sum(axis=0)
    d_scaled = d_out * kept.gain
    along = np.mean(d_scaled * kept.scaled, axis=-1, keepdims=True)
    return np.asarray((d_scaled - kept.scaled * along) * kept.inverse_rms)


def _attention(
    x: Floats, weights: Weights, name: str, shape: DecoderShape, rotation: tuple[Floats, Floats]
) -> tuple[Floats, _KeptAttention]:
    group = shape.heads // shape.kv_heads
    q = _rotate(_split_heads(x @ weights[f"{name}.q_proj.weight"].T, shape.kv_heads, group), rotation)
    k = _rotate(_split_heads(x @ weights[f"{name}.k_proj.weight"].T, shape.kv_heads, 1), rotation)
    v = _split_heads(x @ weights[f"{name}.v_proj.weight"].T, shape.kv_heads, 1)
    length = x.shape[1]
    scores = q @ k.swapaxes(-1, -2) * x.dtype.type(shape.head_dim**-0.5)
    scores[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    share = _softmax(scores)
    mixed = _join_heads(share @ v)
    return mixed @ weights[f"{name}.o_proj.weight"].T, _KeptAttention(x, q, k, v, share, mixed)


def _attention_backward(
    gradients: Gradients,
    d_out: Floats,
    kept: _KeptAttention,
    weights: Weights,
    name: str,
    shape: DecoderShape,
    rotation: tuple[Floats, Floats],
) -> Floats:
    group = shape.heads // shape.kv_heads
    d_mixed = _matmul_backward(gradients, f"{name}.o_proj.weight", d_out, kept.mixed, weights)
    d_heads = _split_heads(d_mixed, shape.kv_heads, group)
    d_share = d_heads @ kept.v.swapaxes(-1, -2)
    d_scores = kept.share * (d_share - np.sum(d_share * kept.share, axis=-1, keepdims=True))
    d_scores *= d_scores.dtype.type(shape.head_dim**-0.5)
    # One key and value head serves `group` query heads, so theirs is a sum over the group.
    d_v = np.sum(kept.share.swapaxes(-1, -2) @ d_heads, axis=2, keepdims=True)
    d_k = np.sum(d_scores.swapaxes(-1, -2) @ kept.q, axis=2, keepdims=True)
    d_q = d_scores @ kept.k
    back = (rotation[0], -rotation[1])
    dx = _matmul_backward(gradients, f"{name}.q_proj.weight", _join_heads(_rotate(d_q, back)), kept.x, weights)
    dx += _matmul_backward(gradients, f"{name}.k_proj.weight", _join_heads(_rotate(d_k, back)), kept.x, weights)
    dx += _matmul_backward(gradients, f"{name}.v_proj.weight", _join_heads(d_v), kept.x, weights)
    return dx


def _split_heads(x: Floats, kv_heads: int, group: int) -> Floats:
    """[batch, length, width] -> [batch, kv_heads, group, length, head_dim]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, kv_heads, group, width // (kv_heads * group)).transpose(0, 2, 3, 1, 4)


def _join_heads(x: Floats) -> Floats:
    batch, kv_heads, group, length, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group * head_dim)


def _rotation(length: int, head_dim: int, dtype: npt.DTypeLike) -> tuple[Floats, Floats]:
    """Cosines and sines [length, head_dim / 2] of the rotary position embedding."""
    frequencies = _ROTARY_BASE ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _rotate(x: Floats, rotation: tuple[Floats, Floats]) -> Floats:
    """Turns the pairs (x[i], x[i + head_dim / 2]); with the sines negated it is its own backward pass."""
    cosine, sine = rotation
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _feed_forward(x: Floats, weights: Weights, name: str) -> tuple[Floats, _KeptFeedForward]:
    gate = x @ weights[f"{name}.gate_proj.weight"].T
    up = x @ weights[f"{name}.up_proj.weight"].T
    out = (gate * _sigmoid(gate) * up) @ weights[f"{name}.down_proj.weight"].T
    return out, _KeptFeedForward(x, gate, up)


def _feed_forward_backward(
    gradients: Gradients, d_out: Floats, kept: _KeptFeedForward, weights: Weights, name: str
) -> Floats:
    sigmoid = _sigmoid(kept.gate)
    silu = kept.gate * sigmoid
    d_inner = _matmul_backward(gradients, f"{name}.down_proj.weight", d_out, silu * kept.up, weights)
    d_gate = d_inner * kept.up * (sigmoid + silu * (1 - sigmoid))
    dx = _matmul_backward(gradients, f"{name}.gate_proj.weight", d_gate, kept.x, weights)
    return dx + _matmul_backward(gradients, f"{name}.up_proj.weight", d_inner * silu, kept.x, weights)


def _sigmoid(x: Floats) -> Floats:
    # By tanh: exp(-x) would overflow for large negative x.
    return np.asarray((1 + np.tanh(x / 2)) / 2)


def _softmax(x: Floats) -> Floats:
    grown = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=-1, keepdims=True))


def _cross_entropy(logits: Floats, targets: Tokens) -> tuple[float, Floats]:
    """Mean loss over all positions and its gradient by `logits`."""
    share = _softmax(logits)
    picked = np.take_along_axis(share, targets[..., None], axis=-1)
    loss = float(-np.mean(np.log(picked)))
    np.put_along_axis(share, targets[..., None], picked - 1, axis=-1)
    return loss, share / share.dtype.type(targets.size)
