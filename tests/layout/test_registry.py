"""Derived placements: which module, which function, and nothing that moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpusync.errors import HookError, LayoutError, RefusedError
from gpusync.layout import DERIVED, DerivedRegistry, PlacementClass, register_derived, trace
from support.models import ModelConfig, fresh_load, make_state, specs_of
from support.models_layers import Mla, Ranks

CONFIG = ModelConfig()


def model_and_layout(registry: DerivedRegistry):
    state = make_state(CONFIG)
    model = fresh_load(CONFIG, Ranks(), state)
    return model, trace(model, model.load_weights, specs_of(state), derived=registry)


@pytest.mark.parametrize("module", [Mla, nn.Module, "layers.1.mla", "layers.*.mla", "*"])
def test_a_module_is_found_by_its_type_or_by_its_name(module):
    registry = DerivedRegistry()
    registry.register(module, Mla.derive, params=("kv_b.weight", "*.kv_b.weight"))
    _, layout = model_and_layout(registry)
    derived = [name for name, each in layout.placements.items() if each.kind is PlacementClass.DERIVED]
    assert derived == ["layers.1.mla.kv_b.weight"]


def test_all_params_of_a_module_count_unless_some_are_named():
    registry = DerivedRegistry()
    registry.register(Mla, Mla.derive)
    _, layout = model_and_layout(registry)
    derived = [name for name, each in layout.placements.items() if each.kind is PlacementClass.DERIVED]
    assert derived == ["layers.1.mla.q_a.weight", "layers.1.mla.kv_a.weight", "layers.1.mla.kv_b.weight"]
    assert layout.derived_modules(derived) == ["layers.1.mla"]


def test_a_registration_that_matches_nothing_changes_nothing():
    registry = DerivedRegistry()
    registry.register("layers.9.*", Mla.derive)
    _, layout = model_and_layout(registry)
    assert layout.bytes_by_class()["derived"] == 0


def test_recomputing_brings_what_was_derived_up_to_date():
    registry = DerivedRegistry()
    registry.register(Mla, Mla.derive)
    model, _ = model_and_layout(registry)
    mla = model.layers[1].mla
    pointers = (mla.w_kc.data_ptr(), mla.w_vc.data_ptr())
    mla.kv_b.weight.data.mul_(2)
    registry.recompute(model, ["layers.1.mla"])
    assert (mla.w_kc.data_ptr(), mla.w_vc.data_ptr()) == pointers
    assert torch.equal(mla.w_kc[0, 0], mla.kv_b.weight[0])


def test_the_last_registration_wins():
    calls = []
    registry = DerivedRegistry()
    registry.register(Mla, lambda module: calls.append("first"))
    registry.register("*.mla", lambda module: calls.append("second"))
    model, _ = model_and_layout(registry)
    registry.recompute(model, ["layers.1.mla"])
    assert calls == ["second"]


def moves_an_attribute(module):
    module.w_kc = module.w_kc.clone()


def drops_an_attribute(module):
    module.w_vc = None


def moves_a_param(module):
    module.kv_b.weight.data = module.kv_b.weight.data.clone()


@pytest.mark.parametrize(
    ("function", "name"), [(moves_an_attribute, "w_kc"), (drops_an_attribute, "w_vc"), (moves_a_param, "kv_b.weight")]
)
def test_a_function_that_moves_something_is_refused(function, name):
    registry = DerivedRegistry()
    registry.register(Mla, function)
    model, _ = model_and_layout(registry)
    keep = (model.layers[1].mla.w_kc, model.layers[1].mla.kv_b.weight.data)
    with pytest.raises(RefusedError, match=f"recomputing `layers.1.mla` has moved `{name}`"):
        registry.recompute(model, ["layers.1.mla"])
    del keep


def test_what_a_function_raises_is_a_hook_error():
    registry = DerivedRegistry()
    registry.register(Mla, lambda module: module.missing)
    model, _ = model_and_layout(registry)
    with pytest.raises(HookError, match=r"recomputes `layers\.1\.mla` raised AttributeError"):
        registry.recompute(model, ["layers.1.mla"])


@pytest.mark.parametrize("name", ["layers.1.experts", "layers.7"])
def test_a_module_without_a_function_is_an_error(name):
    registry = DerivedRegistry()
    registry.register(Mla, Mla.derive)
    model, _ = model_and_layout(registry)
    with pytest.raises(LayoutError, match=f"nothing is registered to recompute for module `{name}`"):
        registry.recompute(model, [name])


def test_register_derived_is_what_trace_goes_by(monkeypatch):
    monkeypatch.setattr(DERIVED, "_derivations", [])
    register_derived(Mla, Mla.derive, params=("kv_b.*",))
    state = make_state(CONFIG)
    model = fresh_load(CONFIG, Ranks(), state)
    layout = trace(model, model.load_weights, specs_of(state))
    assert layout.placements["layers.1.mla.kv_b.weight"].kind is PlacementClass.DERIVED


def test_an_opaque_placement_stays_opaque():
    config = ModelConfig(quantised=True)
    registry = DerivedRegistry()
    registry.register("*", Mla.derive)
    state = make_state(config)
    model = fresh_load(config, Ranks(), state)
    layout = trace(model, model.load_weights, specs_of(state), derived=registry)
    assert layout.placements["layers.0.quantised.weight"].kind is PlacementClass.OPAQUE
    assert layout.derived_modules(["layers.0.quantised.weight"]) == []
