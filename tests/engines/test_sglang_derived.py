"""The absorbed projections of latent attention, recomputed in place."""

from __future__ import annotations

from typing import Any

import torch

from gpusync.engines.sglang.derived import register_absorbed
from gpusync.layout import DerivedRegistry

HEADS, NOPE, VALUE, LATENT = 4, 6, 5, 8


class Attention(torch.nn.Module):
    """Holds what sglang's does, absorbed as sglang does it: stored in other orders than it is used."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.qk_nope_head_dim, self.v_head_dim = NOPE, VALUE
        self.kv_b_proj = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False, dtype=torch.bfloat16)
        keys, values = self.absorb()
        self.w_kc: Any = keys * scale
        self.w_vc: Any = values

    def absorb(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.kv_b_proj.weight.detach()
        keys, values = weight.unflatten(0, (-1, NOPE + VALUE)).split([NOPE, VALUE], dim=1)
        return keys.transpose(1, 2).contiguous().transpose(1, 2), values.contiguous().transpose(1, 2)


class Model(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.other = torch.nn.Linear(3, 3)


def test_what_was_absorbed_follows_its_source_and_stays_where_it_is() -> None:
    torch.manual_seed(0)
    attention = Attention()
    model, registry = Model(attention), DerivedRegistry()
    assert register_absorbed(model, registry) == ["self_attn"]
    assert registry.derived_params(model) == {"self_attn.kv_b_proj.weight": "self_attn"}
    addresses = [attention.w_kc.data_ptr(), attention.w_vc.data_ptr()]
    with torch.no_grad():
        attention.kv_b_proj.weight.mul_(-3)
    registry.recompute(model, ["self_attn"])
    expected = attention.absorb()
    assert torch.equal(attention.w_kc, expected[0])
    assert torch.equal(attention.w_vc, expected[1])
    assert [attention.w_kc.data_ptr(), attention.w_vc.data_ptr()] == addresses


def test_what_is_computed_otherwise_is_left_alone() -> None:
    for attention in (Attention(scale=2.0), torch.nn.Linear(3, 3)):
        registry = DerivedRegistry()
        assert register_absorbed(Model(attention), registry) == []


def test_an_absorbed_weight_of_another_type_is_left_alone() -> None:
    attention = Attention()
    attention.w_kc = attention.w_kc.float()
    assert register_absorbed(Model(attention), DerivedRegistry()) == []
