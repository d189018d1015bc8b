"""Tiny Hugging Face checkpoints with random bf16 weights, as plain states: what engines load, made with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.checkpoints import State, Tensor, write_checkpoint

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 512, 128, 2, 8, 2, 32
COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
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


@dataclass(frozen=True, kw_only=True)
class HfModel:
    config: dict[str, object]
    state: State

    def write(self, directory: Path) -> Path:
        return write_checkpoint(directory, self.state, files={"config.json": json.dumps(self.config)})


def llama(seed: int = 0) -> HfModel:
    config = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return HfModel(config=config, state=_state(seed, _mlp))


def qwen3_moe(seed: int = 0) -> HfModel:
    config = {
        **COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return HfModel(config=config, state=_state(seed, _experts))


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


def _state(seed: int, feed_forward: object) -> State:
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            **dict(feed_forward(f"{at}.mlp")),  # type: ignore[operator]
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: _random(rng, shape) for name, shape in shapes.items()}


def _mlp(at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (256, HIDDEN)
    yield f"{at}.up_proj.weight", (256, HIDDEN)
    yield f"{at}.down_proj.weight", (HIDDEN, 256)


def _experts(at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention = at.replace(".mlp", ".self_attn")
    yield f"{attention}.q_norm.weight", (HEAD,)
    yield f"{attention}.k_norm.weight", (HEAD,)
    yield f"{at}.gate.weight", (8, HIDDEN)
    for expert in range(8):
        yield f"{at}.experts.{expert}.gate_proj.weight", (64, HIDDEN)
        yield f"{at}.experts.{expert}.up_proj.weight", (64, HIDDEN)
        yield f"{at}.experts.{expert}.down_proj.weight", (HIDDEN, 64)


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
