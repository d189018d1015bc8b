"""Small modules with a loader of their own: traced, loaded, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from gpusync.layout import LayoutMap, trace
from support.models import specs_of
from support.models_apply import apply_map, assert_same

Load = Callable[[nn.Module, dict[str, torch.Tensor]], None]


class Case:
    """A module that `params` describes (shape, or shape and dtype), and a loader that gets a dict of all tensors."""

    def __init__(self, params: Mapping[str, object], load: Load) -> None:
        self.params = params
        self.load = load

    def module(self) -> nn.Module:
        module = nn.Module()
        for name, form in self.params.items():
            shape, dtype = form if form and isinstance(form[0], tuple) else (form, torch.float32)  # type: ignore[index]
            data = torch.full(shape, 7, dtype=torch.float32).to(dtype)  # type: ignore[arg-type]
            module.register_parameter(name, nn.Parameter(data, requires_grad=False))
        return module

    def loader(self, module: nn.Module) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
        return lambda weights: self.load(module, dict(weights))

    def trace(self, state: Mapping[str, torch.Tensor], **options: bool) -> LayoutMap:
        module = self.module()
        return trace(module, self.loader(module), specs_of(state), **options)

    def check(self, state: Mapping[str, torch.Tensor]) -> LayoutMap:
        """Traced on one module, loaded for real on another, applied on a third: the last two are the same."""
        layout = self.trace(state)
        assert [(name, each.reason) for name, each in layout.placements.items() if each.reason] == []
        expected, found = self.module(), self.module()
        with torch.no_grad():
            self.load(expected, {name: tensor.clone() for name, tensor in state.items()})
        apply_map(layout, state, found)
        assert_same(found, expected)
        return layout

    def reason(self, state: Mapping[str, torch.Tensor], name: str = "x") -> str:
        """Why the tensor is opaque."""
        placement = self.trace(state).placements[name]
        assert placement.kind.value == "opaque"
        assert placement.reason is not None
        return placement.reason
