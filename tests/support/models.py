"""A small language model as an engine holds it, with every kind of placement, and checkpoints for it.

`TinyModel(config, ranks)` has the params of one rank; `load_weights` takes the checkpoint's tensors by their names;
`post_load` does what engines do after it. With odd sizes, so that little divides by accident.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gpusync.stream import BytesSource, TensorSpec
from support.models_layers import (
    BF16,
    ColumnParallel,
    Experts,
    GateUp,
    Mla,
    Qkv,
    Quantised,
    Ranks,
    Replicated,
    RowParallel,
    Transposed,
    VocabEmbedding,
    load_named,
)

State = dict[str, torch.Tensor]

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.uint8: "U8",
}

ALONE = Ranks()

# (a part of the checkpoint's name, what stands there in the model, what its loader is told)
STACKED = [
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
]
EXPERT = {
    "gate_proj.weight": ("w13_weight", "w1"),
    "up_proj.weight": ("w13_weight", "w3"),
    "down_proj.weight": ("w2_weight", "w2"),
    "gate_proj.bias": ("w13_bias", "w1"),
    "up_proj.bias": ("w13_bias", "w3"),
    "down_proj.scale": ("w2_scale", "scale"),
}


@dataclass(frozen=True)
class ModelConfig:
    """`quantised` adds a linear layer that is quantised on load; `rearranged` swaps the halves of `w13` after it."""

    vocab: int = 21
    hidden: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 3
    width: int = 20
    experts: int = 4
    expert_width: int = 8
    latent: int = 5
    tied: bool = False
    quantised: bool = False
    rearranged: bool = False


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__()
        self.qkv_proj = Qkv(config.hidden, config.heads, config.kv_heads, config.head_dim, ranks)
        self.o_proj = RowParallel(config.heads * config.head_dim, config.hidden, ranks, bias=True)


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__()
        self.gate_up_proj = GateUp(config.hidden, config.width, ranks)
        self.down_proj = RowParallel(config.width, config.hidden, ranks)


class Router(nn.Module):
    """`bias` is kept in float32, the checkpoint has bfloat16."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Replicated(config.experts, config.hidden)
        self.bias = Replicated(config.experts, dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks, *, sparse: bool) -> None:
        super().__init__()
        self.norm = Replicated(config.hidden)
        if sparse:
            self.mla = Mla(config.hidden, config.heads, config.head_dim, config.latent, ranks)
            self.router = Router(config)
            self.experts = Experts(config.experts, config.hidden, config.expert_width, ranks)
            self.mix = Transposed(config.hidden, config.width, ranks)
        else:
            self.attn = Attention(config, ranks)
            self.mlp = Mlp(config, ranks)
            self.cache_scale = Replicated()
            self.empty = Replicated(0, config.hidden)
            if config.quantised:
                self.quantised = Quantised(config.hidden, config.width, ranks)


class TinyModel(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.embed = VocabEmbedding(config.vocab, config.hidden, ranks)
        self.layers = nn.ModuleList([Layer(config, ranks, sparse=False), Layer(config, ranks, sparse=True)])
        self.proj = ColumnParallel(config.hidden, config.width, ranks, bias=True)
        self.lm_head = VocabEmbedding(config.vocab, config.hidden, ranks)
        if config.tied:
            self.lm_head.weight = self.embed.weight
        # Shares its storage with the norm: a view that some engines register for a fused kernel.
        self.register_buffer("norm_view", self.layers[0].norm.weight.data, persistent=False)
        self.register_buffer("positions", torch.arange(7), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names that were loaded. Names that this model does not know are passed over, as engines do."""
        latent: dict[str, torch.Tensor] = {}
        loaded = set()
        for name, tensor in weights:
            if self._load_one(name, tensor, latent):
                loaded.add(name)
        return loaded

    def _load_one(self, name: str, tensor: torch.Tensor, latent: dict[str, torch.Tensor]) -> bool:
        if self.config.tied and name == "lm_head.weight":
            return False
        if ".experts." in name:
            prefix, _, rest = name.partition(".experts.")
            expert, _, part = rest.partition(".")
            param, shard = EXPERT[part]
            load_named(self, f"{prefix}.experts.{param}", tensor, expert=int(expert), shard=shard)
            return True
        if ".q_a." in name or ".kv_a." in name:
            latent[name] = tensor
            other = name.replace(".q_a.", ".kv_a.") if ".q_a." in name else name.replace(".kv_a.", ".q_a.")
            if other in latent:
                first, second = sorted((name, other), key=lambda each: ".kv_a." in each)
                fused = torch.cat([latent[first], latent[second]], dim=0)
                load_named(self, first.replace(".q_a.", ".fused_a."), fused)
            return True
        for old, new, shard in STACKED:
            if old in name:
                load_named(self, name.replace(old, new), tensor, shard)
                return True
        if name not in dict(self.named_parameters()):
            return False
        load_named(self, name, tensor)
        return True

    def post_load(self) -> None:
        for module in self.modules():
            if isinstance(module, Mla):
                module.derive()
            if isinstance(module, Experts) and self.config.rearranged:
                for param in (module.w13_weight, module.w13_bias):
                    param.data.copy_(param.data.roll(param.shape[1] // 2, dims=1))


def make_state(config: ModelConfig, seed: int = 0) -> State:
    """A checkpoint: every bit random, but no NaN and nothing infinite, so that casts are exact everywhere."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, width, part = config.hidden, config.width, config.expert_width
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    state = {
        "embed.weight": tensor(config.vocab, hidden),
        "layers.0.norm.weight": tensor(hidden),
        "layers.0.attn.q_proj.weight": tensor(queries, hidden),
        "layers.0.attn.k_proj.weight": tensor(keys, hidden),
        "layers.0.attn.v_proj.weight": tensor(keys, hidden),
        "layers.0.attn.q_proj.bias": tensor(queries),
        "layers.0.attn.k_proj.bias": tensor(keys),
        "layers.0.attn.v_proj.bias": tensor(keys),
        "layers.0.attn.o_proj.weight": tensor(hidden, queries),
        "layers.0.attn.o_proj.bias": tensor(hidden),
        "layers.0.mlp.gate_proj.weight": tensor(width, hidden),
        "layers.0.mlp.up_proj.weight": tensor(width, hidden),
        "layers.0.mlp.down_proj.weight": tensor(hidden, width),
        "layers.0.cache_scale.weight": tensor(),
        "layers.0.empty.weight": tensor(0, hidden),
        "layers.1.norm.weight": tensor(hidden),
        "layers.1.mla.q_a.weight": tensor(config.latent, hidden),
        "layers.1.mla.kv_a.weight": tensor(config.latent, hidden),
        "layers.1.mla.kv_b.weight": tensor(2 * queries, config.latent),
        "layers.1.router.gate.weight": tensor(config.experts, hidden),
        "layers.1.router.bias.weight": tensor(config.experts),
        "layers.1.mix.weight": tensor(width, hidden),
        "proj.weight": tensor(width, hidden),
        "proj.bias": tensor(width),
        "lm_head.weight": tensor(config.vocab, hidden),
        "mtp.layers.0.weight": tensor(hidden, hidden),
    }
    for expert in range(config.experts):
        prefix = f"layers.1.experts.{expert}"
        state[f"{prefix}.gate_proj.weight"] = tensor(part, hidden)
        state[f"{prefix}.up_proj.weight"] = tensor(part, hidden)
        state[f"{prefix}.down_proj.weight"] = tensor(hidden, part)
        state[f"{prefix}.gate_proj.bias"] = tensor(part)
        state[f"{prefix}.up_proj.bias"] = tensor(part)
        state[f"{prefix}.down_proj.scale"] = tensor(dtype=torch.float32)
    if config.quantised:
        state["layers.0.quantised.weight"] = tensor(width, hidden)
    if config.tied:
        state["lm_head.weight"] = state["embed.weight"].clone()
    return state


def fresh_load(config: ModelConfig, ranks: Ranks, state: State) -> TinyModel:
    """What a rank holds after an ordinary load of a checkpoint."""
    model = TinyModel(config, ranks)
    with torch.no_grad():
        model.load_weights((name, tensor.clone()) for name, tensor in state.items())
        model.post_load()
    return model


def specs_of(state: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name=name,
            dtype=DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
            nbytes=math.prod(tensor.shape) * tensor.element_size(),
        )
        for name, tensor in state.items()
    }


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor as a checkpoint has them. A copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def reader_of(state: Mapping[str, torch.Tensor]) -> Callable[[str], BytesSource]:
    """Bytes of tensors by name."""
    return lambda name: BytesSource(tensor_bytes(state[name]))


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the storage behind a tensor on the CPU. A view: writing to it changes the tensor."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy()


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Params, buffers, and what was derived from them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for name, module in model.named_modules():
        if isinstance(module, Mla):
            yield from ((f"{name}.{each}", getattr(module, each)) for each in ("w_kc", "w_vc"))
