"""Tiny Hugging Face checkpoints with random bf16 weights, as plain states: what engines load, made with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.checkpoints import State, Tensor, write_checkpoint

EXPERTS, EXPERT_HIDDEN = 8, 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    vocabulary: int = 512
    hidden: int = 128
    inner: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    head: int = 32

    def config(self) -> dict[str, object]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "torch_dtype": "bfloat16",
        }


TINY = Sizes()
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class HfModel:
    config: dict[str, object]
    state: State

    def write(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.state, files={"config.json": json.dumps(self.config)})


def llama(seed: int = 0, sizes: Sizes = TINY) -> HfModel:
    config = {**sizes.config(), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return HfModel(config=config, state=_state(seed, sizes, _mlp))


def qwen3_moe(seed: int = 0, sizes: Sizes = TINY) -> HfModel:
    config = {
        **sizes.config(),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return HfModel(config=config, state=_state(seed, sizes, _experts))


def next_state(state: State, seed: int, *, share: float = 0.02) -> State:
    """Some elements of every tensor have moved, far enough to change what a model says."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, each in state.items():
        words = each.data.view("<u2").copy()
        at = np.unique(rng.integers(0, words.size, max(1, int(words.size * share))))
        values = _as_f32(words[at])
        words[at] = _as_bf16(values + rng.normal(0, 0.3, at.size).astype(np.float32))
        after[name] = Tensor(each.dtype, each.shape, words.view(np.uint8))
    return after


def _state(seed: int, sizes: Sizes, feed_forward: Callable[[str, Sizes], Shapes]) -> State:
    rng = np.random.default_rng(seed)
    hidden, attended, keys = sizes.hidden, sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocabulary, hidden),
        "lm_head.weight": (sizes.vocabulary, hidden),
    }
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (attended, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, attended),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            **dict(feed_forward(at, sizes)),
        }
    shapes["model.norm.weight"] = (hidden,)
    return {name: _random(rng, shape) for name, shape in shapes.items()}


def _mlp(at: str, sizes: Sizes) -> Shapes:
    yield f"{at}.mlp.gate_proj.weight", (sizes.inner, sizes.hidden)
    yield f"{at}.mlp.up_proj.weight", (sizes.inner, sizes.hidden)
    yield f"{at}.mlp.down_proj.weight", (sizes.hidden, sizes.inner)


def _experts(at: str, sizes: Sizes) -> Shapes:
    yield f"{at}.self_attn.q_norm.weight", (sizes.head,)
    yield f"{at}.self_attn.k_norm.weight", (sizes.head,)
    yield f"{at}.mlp.gate.weight", (EXPERTS, sizes.hidden)
    for expert in range(EXPERTS):
        yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (EXPERT_HIDDEN, sizes.hidden)
        yield f"{at}.mlp.experts.{expert}.up_proj.weight", (EXPERT_HIDDEN, sizes.hidden)
        yield f"{at}.mlp.experts.{expert}.down_proj.weight", (sizes.hidden, EXPERT_HIDDEN)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    values = rng.normal(0, 0.3, shape).astype(np.float32)
    if len(shape) == 1:
        values += 1  # norms
    return Tensor("BF16", shape, _as_bf16(values).reshape(-1).view(np.uint8))


def _as_bf16(values: np.ndarray) -> np.ndarray:
    """Cut, not rounded."""
    return (values.view("<u4") >> 16).astype("<u2")


def _as_f32(words: np.ndarray) -> np.ndarray:
    return (words.astype("<u4") << 16).view("<f4")
