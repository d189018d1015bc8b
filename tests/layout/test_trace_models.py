"""Tracing a whole model: on every rank, the map applied to a checkpoint gives what its own loader gives."""

from __future__ import annotations

import pytest
import torch

from gpusync.layout import DerivedRegistry, LayoutMap, PlacementClass, named_tensors, trace
from support.models import ModelConfig, State, TinyModel, fresh_load, make_state, specs_of
from support.models_apply import apply_map, assert_same, tensor_bytes
from support.models_layers import Mla, Ranks

RANKS = [
    Ranks(rank, size, ep)
    for size, ep in ((1, False), (2, False), (4, False), (2, True), (4, True))
    for rank in range(size)
]


def registry() -> DerivedRegistry:
    derived = DerivedRegistry()
    derived.register(Mla, Mla.derive, params=("kv_b.*",))
    return derived


def trace_model(config: ModelConfig, ranks: Ranks, state: State, model: TinyModel | None = None) -> LayoutMap:
    model = model or TinyModel(config, ranks)
    return trace(model, model.load_weights, specs_of(state), derived=registry())


def kind_of(layout: LayoutMap, name: str) -> str:
    return layout.placements[name].kind.value


def rank_id(ranks: Ranks) -> str:
    return f"{'ep' if ranks.ep else 'tp'}{ranks.size}-{ranks.rank}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", RANKS, ids=rank_id)
def test_the_map_applied_to_a_checkpoint_is_a_fresh_load(ranks, tied):
    config = ModelConfig(tied=tied)
    old, new = make_state(config, 1), make_state(config, 2)
    model = TinyModel(config, ranks)
    layout = trace_model(config, ranks, old, model)
    with torch.no_grad():
        model.load_weights(iter(old.items()))
        model.post_load()
    apply_map(layout, new, model)
    registry().recompute(model, layout.derived_modules(new))
    assert_same(model, fresh_load(config, ranks, new))


@pytest.mark.parametrize("ranks", RANKS, ids=rank_id)
def test_the_map_fills_empty_params_as_a_fresh_load_does(ranks):
    config = ModelConfig()
    state = make_state(config)
    model = TinyModel(config, ranks)
    layout = trace_model(config, ranks, state, model)
    apply_map(layout, state, model)
    # The loader zeroes the padding of the vocabulary, the map leaves it alone: here it still has its first bytes.
    for embedding in (model.embed, model.lm_head):
        padding = embedding.weight.data[max(0, min(config.vocab - ranks.rank * len(embedding.weight), 24)) :]
        assert set(tensor_bytes(padding)) <= {0x5A}
        padding.zero_()
    model.post_load()
    assert_same(model, fresh_load(config, ranks, state))


def test_tracing_changes_not_one_byte_of_a_loaded_model():
    config = ModelConfig(quantised=True)
    state = make_state(config)
    model = fresh_load(config, Ranks(1, 2), state)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    pointers = {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()}
    layout = trace_model(config, Ranks(1, 2), state, model)
    assert layout == trace_model(config, Ranks(1, 2), state)
    for name, tensor in named_tensors(model).items():
        assert tensor.data_ptr() == pointers[name]
        assert tensor_bytes(tensor).tobytes() == tensor_bytes(before[name]).tobytes()


@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(3, 4), Ranks(1, 2, ep=True)], ids=rank_id)
def test_a_twin_on_the_meta_device_gives_the_same_map(ranks):
    config = ModelConfig(quantised=True)
    state = make_state(config)
    with torch.device("meta"):
        twin = TinyModel(config, ranks)
    layout = trace(twin, twin.load_weights, specs_of(state), derived=registry(), is_twin=True)
    assert layout == trace_model(config, ranks, state)


def test_each_kind_of_placement_is_what_it_is():
    config = ModelConfig(quantised=True)
    layout = trace_model(config, Ranks(0, 2), make_state(config))
    assert kind_of(layout, "layers.0.attn.q_proj.weight") == "direct"
    assert kind_of(layout, "layers.1.mix.weight") == "direct"
    assert kind_of(layout, "layers.1.mla.q_a.weight") == "direct"
    assert kind_of(layout, "layers.0.cache_scale.weight") == "direct"
    assert kind_of(layout, "layers.1.router.bias.weight") == "cast"
    assert kind_of(layout, "layers.1.mla.kv_b.weight") == "derived"
    assert layout.placements["layers.1.mla.kv_b.weight"].derives == "layers.1.mla"
    assert kind_of(layout, "layers.0.quantised.weight") == "opaque"
    reason = layout.placements["layers.0.quantised.weight"].reason
    assert reason is not None
    assert "aten.div.Tensor" in reason


def test_bytes_are_counted_by_class():
    config = ModelConfig(quantised=True)
    state = make_state(config)
    layout = trace_model(config, Ranks(), state)
    counted = layout.bytes_by_class()
    assert list(counted) == [kind.value for kind in PlacementClass]
    assert counted["cast"] == config.experts * 2
    assert counted["derived"] == state["layers.1.mla.kv_b.weight"].nbytes
    assert counted["opaque"] == state["layers.0.quantised.weight"].nbytes
    here = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("mtp."))
    assert sum(counted.values()) == here


def test_an_empty_tensor_is_direct_and_has_nothing():
    config = ModelConfig()
    layout = trace_model(config, Ranks(), make_state(config))
    placement = layout.placements["layers.0.empty.weight"]
    assert (placement.kind, placement.pieces, placement.owned_bytes) == (PlacementClass.DIRECT, (), 0)


def test_names_a_rank_does_not_own_are_elsewhere():
    config = ModelConfig(tied=True)
    layout = trace_model(config, Ranks(1, 2, ep=True), make_state(config))
    others = {"mtp.layers.0.weight", "lm_head.weight"}
    others |= {name for name in make_state(config) if ".experts.0." in name or ".experts.1." in name}
    assert set(layout.elsewhere) == others
    assert layout.elsewhere["mtp.layers.0.weight"].shape == (12, 12)


def test_ranks_that_share_a_head_hold_the_same_bytes_of_it():
    config = ModelConfig()
    state = make_state(config)
    name = "layers.0.attn.k_proj.weight"
    first, second, third, _ = (trace_model(config, Ranks(rank, 4), state).placements[name] for rank in range(4))
    assert first.pieces == second.pieces != third.pieces
    assert first.owned_bytes == state[name].nbytes // 2


@pytest.mark.parametrize(("size", "ranks_padding"), [(1, [3]), (2, [0, 3]), (4, [0, 0, 0, 3])])
def test_padding_counts_as_untouched(size, ranks_padding):
    config = ModelConfig()
    row = config.hidden * 2
    for rank, padding in enumerate(ranks_padding):
        untouched = trace_model(config, Ranks(rank, size), make_state(config)).untouched_bytes()
        assert untouched.get("embed.weight", 0) == padding * row
        assert untouched["positions"] == 7 * 8
        assert untouched.keys() <= {"embed.weight", "lm_head.weight", "positions"}


def test_a_tied_param_is_one_storage_under_its_first_name():
    config = ModelConfig(tied=True)
    layout = trace_model(config, Ranks(), make_state(config))
    assert "lm_head.weight" not in layout.storages
    assert layout.params["lm_head.weight"].storage == "embed.weight"
    assert [piece.param for piece in layout.placements["embed.weight"].pieces] == ["embed.weight"]


def test_a_buffer_that_aliases_a_param_is_patched_as_that_param():
    config = ModelConfig()
    layout = trace_model(config, Ranks(), make_state(config))
    assert layout.params["norm_view"].storage == "layers.0.norm.weight"
    assert [piece.param for piece in layout.placements["layers.0.norm.weight"].pieces] == ["layers.0.norm.weight"]


@pytest.mark.parametrize("tensor", ["layers.1.experts.2.gate_proj.weight", "proj.weight"])
def test_a_tensor_that_does_not_fit_is_opaque_and_says_so(tensor):
    # The checkpoint of another model of the family: an expert that is not to be sharded, a projection too wide.
    config = ModelConfig()
    state = make_state(config)
    state[tensor] = state[tensor].repeat(2, 2)
    layout = trace_model(config, Ranks(0, 2), state)
    assert [name for name, each in layout.placements.items() if each.kind is PlacementClass.OPAQUE] == [tensor]
    reason = layout.placements[tensor].reason
    assert reason is not None
    assert "raised" in reason
    assert "24" in reason
