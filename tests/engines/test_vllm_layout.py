"""What an engine makes of its params after a load, and which of them are patched no longer for it."""

from __future__ import annotations

import torch

from gpusync.engines.vllm.layout import iterate_closures, without_copies
from gpusync.layout import LayoutMap, PlacementClass, trace
from gpusync.layout.targets import iterate_attributes
from gpusync.stream import TensorSpec


class Attention(torch.nn.Module):
    """Holds a projection of the module around it."""

    def __init__(self, projection: torch.nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.cache = torch.zeros(3)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(4, 4, bias=False)
        self.other = torch.nn.Linear(4, 4, bias=False)
        self.attention = Attention(self.projection)
        factor = 2
        self.other.scale = lambda x: x * factor


NAMES = ("projection.weight", "other.weight")


def _traced(model: Layer) -> tuple[LayoutMap, set[str]]:
    params = dict(model.named_parameters())

    def load(weights: object) -> None:
        for name, tensor in weights:  # type: ignore[attr-defined]
            params[name].data.copy_(tensor)

    layout = trace(model, load, {name: TensorSpec(name=name, dtype="F32", shape=(4, 4), nbytes=64) for name in NAMES})
    return layout, {name for name, _ in [*iterate_attributes(model), *iterate_closures(model)]}


def _opaque(layout: LayoutMap) -> list[str]:
    return [name for name, each in layout.placements.items() if each.kind is PlacementClass.OPAQUE]


def test_what_the_model_had_before_it_was_loaded_is_no_copy() -> None:
    model = Layer()
    layout, had = _traced(model)
    assert _opaque(without_copies(layout, model, had)) == []


def test_a_function_that_has_captured_a_packed_weight_demotes_its_module() -> None:
    model = Layer()
    layout, had = _traced(model)
    packed = model.other.weight.detach().clone()
    model.other.cpu_linear = lambda x: x @ packed  # type: ignore[assignment]
    demoted = without_copies(layout, model, had)
    assert _opaque(demoted) == ["other.weight"]
    assert "other.cpu_linear" in str(demoted.placements["other.weight"].reason)


def test_a_function_that_has_captured_nothing_is_no_copy() -> None:
    model = Layer()
    layout, had = _traced(model)
    model.other.cpu_linear = lambda x, weight: x @ weight  # type: ignore[assignment]
    assert _opaque(without_copies(layout, model, had)) == []


def test_a_tensor_made_of_a_projection_of_the_module_around_demotes_it() -> None:
    model = Layer()
    layout, had = _traced(model)
    model.attention.absorbed = model.projection.weight.detach().t().contiguous()  # type: ignore[assignment]
    assert _opaque(without_copies(layout, model, had)) == ["projection.weight"]


def test_a_function_in_a_list_counts() -> None:
    model = Layer()
    layout, had = _traced(model)
    packed = torch.zeros(4, 4)
    model.other.kernels = [lambda x: x @ packed]  # type: ignore[assignment]
    assert _opaque(without_copies(layout, model, had)) == ["other.weight"]
