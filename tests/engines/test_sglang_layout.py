"""What of a traced layout is not trusted, and where a model was loaded from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusync.engines.sglang.layout import _without_unknown_caches, resolve_base
from gpusync.errors import RefusedError
from gpusync.layout import LayoutMap, PlacementClass, trace
from gpusync.layout.targets import iterate_attributes
from support.models import specs_of


class Model(torch.nn.Module):
    """Two blocks, each with a table that is there from the start."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            for name in ("first", "second"):
                block = torch.nn.Linear(4, 4, bias=False)
                block.register_buffer("table", torch.arange(4), persistent=False)
                self.add_module(name, block)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def traced() -> tuple[LayoutMap, set[str]]:
    twin = Model("meta")
    had = {attribute for attribute, _ in iterate_attributes(twin)}
    tensors = {f"{name}.weight": torch.zeros(4, 4) for name in ("first", "second")}
    with torch.no_grad():
        return trace(twin, twin.load_weights, specs_of(tensors), is_twin=True), had


def test_tables_that_a_model_is_made_with_are_no_caches() -> None:
    layout, had = traced()
    kept = _without_unknown_caches(layout, Model(), had)
    assert {placement.kind for placement in kept.placements.values()} == {PlacementClass.DIRECT}


def test_what_a_module_has_made_of_its_params_makes_them_opaque() -> None:
    layout, had = traced()
    model = Model()
    model.first.made = model.first.weight.detach() * 2  # type: ignore[assignment]
    kept = _without_unknown_caches(layout, model, had)
    assert kept.placements["first.weight"].kind is PlacementClass.OPAQUE
    assert "first.made" in str(kept.placements["first.weight"].reason)
    assert kept.placements["second.weight"].kind is PlacementClass.DIRECT


def test_a_view_of_a_param_is_no_cache() -> None:
    layout, had = traced()
    model = Model()
    model.first.seen = model.first.weight.detach().t()  # type: ignore[assignment]
    kept = _without_unknown_caches(layout, model, had)
    assert kept.placements["first.weight"].kind is PlacementClass.DIRECT


def _runner(path: Path) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(model_path=str(path), revision=None))


def test_the_base_is_where_the_models_were_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert resolve_base([("target", _runner(tmp_path / "link"))]) == tmp_path
    assert resolve_base([("target", _runner(tmp_path)), ("draft", _runner(tmp_path))]) == tmp_path


def test_a_draft_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="draft"):
        resolve_base([("target", _runner(tmp_path)), ("draft", _runner(tmp_path / "other"))])
