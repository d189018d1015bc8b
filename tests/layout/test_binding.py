"""Attach: what engines do to params after the load, and before an update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpusync.errors import RefusedError
from gpusync.layout import attach, check_addresses, find_unmapped, named_tensors, storage_bytes, trace
from support.models import ModelConfig, TinyModel, fresh_load, make_state, specs_of
from support.models_layers import Ranks

CONFIG = ModelConfig()


def loaded():
    """A map that was traced on a twin, and the model that serves."""
    state = make_state(CONFIG)
    with torch.device("meta"):
        twin = TinyModel(CONFIG, Ranks(1, 2))
    layout = trace(twin, twin.load_weights, specs_of(state), is_twin=True)
    return layout, fresh_load(CONFIG, Ranks(1, 2), state)


def set_param(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(tensor, requires_grad=False))


def test_an_unchanged_model_is_bound_as_it_is():
    layout, model = loaded()
    bound, demotions = attach(layout, named_tensors(model))
    assert demotions == []
    assert bound.placements == layout.placements
    assert bound.params == layout.params
    for name, storage in bound.storages.items():
        assert storage.data_ptr == named_tensors(model)[name].untyped_storage().data_ptr()
        assert (storage.device, storage.nbytes) == ("cpu", layout.storages[name].nbytes)
    check_addresses(bound, named_tensors(model))


def drop(model):
    del model.proj.weight


def convert(model):
    set_param(model, "proj.weight", model.proj.weight.data.float())


def reshape(model):
    set_param(model, "proj.weight", model.proj.weight.data.view(-1))


def transpose_for_real(model):
    set_param(model, "proj.weight", model.proj.weight.data.t().contiguous())


def repack(model):
    set_param(model, "proj.weight", torch.zeros(64, dtype=torch.bfloat16)[:60].view(5, 12))


def flatten_all(model):
    flat = torch.cat([torch.zeros(8, dtype=torch.bfloat16), model.proj.weight.data.view(-1)])
    set_param(model, "proj.weight", flat[8:].view_as(model.proj.weight))


def release(model):
    model.proj.weight.data = torch.empty(0, dtype=torch.bfloat16)


def go_to_sleep(model):
    model.proj.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "parameter `proj.weight` is gone since the trace"),
        (convert, "parameter `proj.weight` has become F32, it was BF16"),
        (reshape, "parameter `proj.weight` has another shape: [120] with strides [1] from 0, it was [10, 12]"),
        (transpose_for_real, "has another shape: [12, 10] with strides [10, 1]"),
        (repack, "has another shape"),
        (flatten_all, "with strides [12, 1] from 8, it was"),
        (release, "has another shape: [0]"),
        (go_to_sleep, "the storage of parameter `proj.weight` has another size"),
    ],
)
def test_a_param_that_is_not_what_was_traced_makes_its_tensors_opaque(change, reason):
    layout, model = loaded()
    change(model)
    bound, demotions = attach(layout, named_tensors(model))
    assert [each.tensor for each in demotions] == ["proj.weight"]
    assert reason in demotions[0].reason
    assert bound.placements["proj.weight"].kind.value == "opaque"
    assert bound.placements["proj.bias"].kind.value == "direct"
    # What is opaque is not patched, so nobody minds where it lies.
    check_addresses(bound, named_tensors(model))


def test_a_mere_transpose_keeps_its_bytes_where_they_were():
    layout, model = loaded()
    set_param(model, "proj.weight", model.proj.weight.data.t())
    bound, demotions = attach(layout, named_tensors(model))
    assert demotions == []
    assert bound.params["proj.weight"].shape == (12, 10)
    check_addresses(bound, named_tensors(model))


def test_params_tied_only_after_the_load_are_opaque():
    layout, model = loaded()
    model.lm_head.weight = model.embed.weight
    bound, demotions = attach(layout, named_tensors(model))
    assert sorted(each.tensor for each in demotions) == ["embed.weight", "lm_head.weight"]
    assert "have come to share a storage" in demotions[0].reason
    assert bound.placements["embed.weight"].kind.value == "opaque"


def test_params_no_longer_tied_are_opaque():
    config = ModelConfig(tied=True)
    state = make_state(config)
    model = fresh_load(config, Ranks(), state)
    layout = trace(model, model.load_weights, specs_of(state))
    model.lm_head.weight = nn.Parameter(model.embed.weight.data.clone(), requires_grad=False)
    _, demotions = attach(layout, named_tensors(model))
    assert [each.tensor for each in demotions] == ["embed.weight"]
    assert "do so no longer" in demotions[0].reason


def move(model):
    model.proj.weight.data = model.proj.weight.data.clone()


def replace_by_a_copy(model):
    set_param(model, "proj.weight", model.proj.weight.data.clone())


def transpose(model):
    model.proj.weight.data = model.proj.weight.data.t()


def unalias(model):
    model.norm_view = model.norm_view.clone()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (move, "`proj.weight` has moved, or was released"),
        (replace_by_a_copy, "`proj.weight` has moved, or was released"),
        (release, "`proj.weight` has moved, or was released"),
        (go_to_sleep, "`proj.weight` has moved, or was released"),
        (drop, "`proj.weight` is gone"),
        (transpose, "`proj.weight` is another view of its storage"),
        (unalias, "`norm_view` has moved"),
    ],
)
def test_a_param_that_does_not_lie_where_it_lay_at_attach_is_refused(change, text):
    layout, model = loaded()
    layout, _ = attach(layout, named_tensors(model))
    keep = [tensor.data for tensor in named_tensors(model).values() if change is not go_to_sleep]
    change(model)
    with pytest.raises(RefusedError, match=text) as caught:
        check_addresses(layout, named_tensors(model))
    assert caught.value.found is not None
    del keep


def test_a_map_that_was_never_attached_is_refused():
    layout, model = loaded()
    with pytest.raises(RefusedError, match="never attached"):
        check_addresses(layout, named_tensors(model))


def test_a_param_object_may_be_exchanged_as_long_as_its_memory_stays():
    layout, model = loaded()
    layout, _ = attach(layout, named_tensors(model))
    set_param(model, "proj.weight", model.proj.weight.data)
    check_addresses(layout, named_tensors(model))


def test_storages_are_the_params_own_memory():
    _, model = loaded()
    storage, tied = storage_bytes(named_tensors(model), ["proj.weight", "norm_view"])
    assert (storage.dtype, storage.dim(), storage.numel()) == (torch.uint8, 1, 240)
    tied.zero_()
    assert model.layers[0].norm.weight.abs().sum() == 0
    with pytest.raises(RefusedError, match="`none` is gone"):
        storage_bytes(named_tensors(model), ["none"])


def test_what_an_engine_has_computed_or_added_is_found():
    layout, model = loaded()
    layout, _ = attach(layout, named_tensors(model))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.packed = [model.proj.weight.data.clone()]
    model.view = model.proj.weight.data.t()
    assert find_unmapped(layout, model) == ["cache", "packed", "layers.1.mla.w_kc", "layers.1.mla.w_vc"]
