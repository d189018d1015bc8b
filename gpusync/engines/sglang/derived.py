"""What sglang computes of params once, after a load: the absorbed projections of latent attention.

Only where it can be seen, on the weights that were loaded, that what is computed here is what sglang has computed: what
a quantised `kv_b_proj` leads to is left alone, and its module is committed by a reload.
"""

from __future__ import annotations

from typing import Any

import torch

from gpusync.layout import DerivedRegistry

SOURCE = "kv_b_proj.weight"


def register_absorbed(model: torch.nn.Module, registry: DerivedRegistry) -> list[str]:
    """The names of the modules for which `registry` has a function now."""
    found = [name for name, module in model.named_modules() if _is_understood(module)]
    for name in found:
        registry.register(name, recompute_absorbed, params=(SOURCE,))
    return found


def recompute_absorbed(attention: Any) -> None:
    """`w_kc` and `w_vc` of `kv_b_proj`, in place."""
    keys, values = _absorbed(attention)
    attention.w_kc.copy_(keys)
    attention.w_vc.copy_(values)


def _absorbed(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    keys, values = attention.kv_b_proj.weight.unflatten(0, (-1, nope + value)).split([nope, value], dim=1)
    return keys, values.transpose(1, 2)


def _is_understood(module: Any) -> bool:
    held: list[Any] = [getattr(module, name, None) for name in ("w_kc", "w_vc")]
    weight: Any = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    if not all(isinstance(each, torch.Tensor) for each in (*held, weight)):
        return False
    if not all(hasattr(module, name) for name in ("qk_nope_head_dim", "v_head_dim")):
        return False
    if any(each.dtype != weight.dtype for each in held):
        return False
    expected = _absorbed(module)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(held, expected, strict=True))
