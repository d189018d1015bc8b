"""The layers of a small engine, sharded over tensor-parallel ranks the way serving engines do it.

Each param carries its own `weight_loader(param, loaded, ...)`, which slices the checkpoint's tensor for this rank and
copies it in. Written for the tests; nothing of gpusync is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Ranks:
    """This rank of a tensor-parallel group. With `ep`, experts are dealt whole to ranks."""

    rank: int = 0
    size: int = 1
    ep: bool = False


def new_param(*shape: int, dtype: torch.dtype = BF16, loader: Callable[..., None] | None = None) -> nn.Parameter:
    """Uninitialised, as an engine leaves it: here every byte is 0x5A, so that one that is not written shows."""
    data = torch.empty(shape, dtype=dtype)
    if data.numel() and data.device.type != "meta":
        data.view(-1).view(torch.uint8).fill_(0x5A)
    param = nn.Parameter(data, requires_grad=False)
    param.weight_loader = loader or copy_whole
    return param


def copy_whole(param: nn.Parameter, loaded: torch.Tensor) -> None:
    if param.numel() == 1 and loaded.numel() == 1:
        param.data.fill_(loaded.item())
        return
    if param.size() != loaded.size():
        raise ValueError(f"cannot load {tuple(loaded.shape)} into {tuple(param.shape)}")
    param.data.copy_(loaded)


def shard_of(loaded: torch.Tensor, dim: int, ranks: Ranks) -> torch.Tensor:
    part = loaded.shape[dim] // ranks.size
    return loaded.narrow(dim, ranks.rank * part, part)


class ColumnParallel(nn.Module):
    """[out, in], rows over ranks; with a bias if wanted."""

    def __init__(self, inputs: int, outputs: int, ranks: Ranks, *, bias: bool = False) -> None:
        super().__init__()

        def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
            copy_whole(param, shard_of(loaded, 0, ranks))

        self.weight = new_param(outputs // ranks.size, inputs, loader=load)
        if bias:
            self.bias = new_param(outputs // ranks.size, loader=load)


class RowParallel(nn.Module):
    """[out, in], columns over ranks; the bias, if any, on every rank."""

    def __init__(self, inputs: int, outputs: int, ranks: Ranks, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = new_param(
            outputs,
            inputs // ranks.size,
            loader=lambda param, loaded: copy_whole(param, shard_of(loaded, 1, ranks)),
        )
        if bias:
            self.bias = new_param(outputs)


class Replicated(nn.Module):
    """The same on every rank."""

    def __init__(self, *shape: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.weight = new_param(*shape, dtype=dtype)


class GateUp(nn.Module):
    """gate and up projections, one after the other in one param."""

    def __init__(self, inputs: int, outputs: int, ranks: Ranks) -> None:
        super().__init__()
        part = outputs // ranks.size

        def load(param: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
            param.data.narrow(0, shard * part, part).copy_(shard_of(loaded, 0, ranks))

        self.weight = new_param(2 * part, inputs, loader=load)


class Qkv(nn.Module):
    """q, k and v in one param. With fewer kv heads than ranks, a head is replicated over neighbouring ranks."""

    def __init__(self, inputs: int, heads: int, kv_heads: int, head_dim: int, ranks: Ranks) -> None:
        super().__init__()
        queries, keys = heads // ranks.size * head_dim, max(kv_heads // ranks.size, 1) * head_dim
        replicas = max(ranks.size // kv_heads, 1)
        places = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}

        def load(param: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
            start, size = places[shard]
            index = ranks.rank if shard == "q" else ranks.rank // replicas
            param.data[start : start + size] = loaded.narrow(0, index * size, size)

        self.weight = new_param(queries + 2 * keys, inputs, loader=load)
        self.bias = new_param(queries + 2 * keys, loader=load)


class VocabEmbedding(nn.Module):
    """Rows over ranks, padded to a multiple of 8 so that they divide; the padding is zeroed when it is loaded."""

    def __init__(self, vocab: int, width: int, ranks: Ranks) -> None:
        super().__init__()
        part = -(-vocab // 8) * 8 // ranks.size

        def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
            start = min(ranks.rank * part, vocab)
            held = loaded.narrow(0, start, min(part, vocab - start))
            param.data[held.shape[0] :].fill_(0)
            param.data[: held.shape[0]].copy_(held)

        self.weight = new_param(part, width, loader=load)


class Transposed(nn.Module):
    """Rows over ranks, kept as [in, out] because a kernel wants it so."""

    def __init__(self, inputs: int, outputs: int, ranks: Ranks) -> None:
        super().__init__()

        def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
            param.data.copy_(shard_of(loaded, 0, ranks).t().contiguous())

        self.weight = new_param(inputs, outputs // ranks.size, loader=load)


class Quantised(nn.Module):
    """FP8 with one scale, quantised while it is loaded."""

    def __init__(self, inputs: int, outputs: int, ranks: Ranks) -> None:
        super().__init__()
        self.scale = new_param(1, dtype=torch.float32)

        def load(param: nn.Parameter, loaded: torch.Tensor) -> None:
            shard = shard_of(loaded, 0, ranks).float()
            scale = shard.abs().max() / 448.0
            self.scale.data.copy_(scale.reshape(1))
            param.data.copy_((shard / scale).to(torch.float8_e4m3fn))

        self.weight = new_param(outputs // ranks.size, inputs, dtype=torch.float8_e4m3fn, loader=load)


class Experts(nn.Module):
    """w13 [experts, 2 * width, in] and w2 [experts, in, width], with a scale per expert: split over ranks (TP) or dealt
    whole (EP). `load` takes one expert's `w1`, `w2` or `w3`.
    """

    def __init__(self, experts: int, inputs: int, width: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.held = experts // ranks.size if ranks.ep else experts
        part = width if ranks.ep else width // ranks.size
        self.w13_weight = new_param(self.held, 2 * part, inputs, loader=self.load)
        self.w2_weight = new_param(self.held, inputs, part, loader=self.load)
        self.w13_bias = new_param(self.held, 2 * part, loader=self.load)
        self.w2_scale = new_param(self.held, dtype=torch.float32, loader=self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, *, expert: int, shard: str) -> None:
        index = expert - self.ranks.rank * self.held if self.ranks.ep else expert
        if not 0 <= index < self.held:
            return
        target = param.data[index]
        if shard == "scale":
            param.data[index] = loaded
            return
        if not self.ranks.ep:
            loaded = shard_of(loaded, 1 if shard == "w2" else 0, self.ranks)
        if shard != "w2":
            half = target.shape[0] // 2
            target = target.narrow(0, half if shard == "w3" else 0, half)
        target.copy_(loaded)


class Mla(nn.Module):
    """Latent attention: `q_a` and `kv_a` joined on load; `w_kc` and `w_vc` computed from `kv_b` after it."""

    def __init__(self, inputs: int, heads: int, head_dim: int, rank_dim: int, ranks: Ranks) -> None:
        super().__init__()
        self.heads, self.head_dim = heads // ranks.size, head_dim
        self.fused_a = Replicated(2 * rank_dim, inputs)
        self.kv_b = ColumnParallel(rank_dim, 2 * heads * head_dim, ranks)
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    def derive(self) -> None:
        """In place where they are there already, as a captured graph needs it."""
        both = self.kv_b.weight.data.unflatten(0, (self.heads, 2 * self.head_dim))
        keys, values = both.split(self.head_dim, dim=1)
        values = values.transpose(1, 2).contiguous()
        if self.w_kc is None or self.w_vc is None:
            self.w_kc, self.w_vc = keys.contiguous(), values
        else:
            self.w_kc.copy_(keys)
            self.w_vc.copy_(values)


def load_named(module: nn.Module, name: str, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Hands a tensor to the loader of the param of that name."""
    param = module.get_parameter(name)
    param.weight_loader(param, loaded, *args, **kwargs)
