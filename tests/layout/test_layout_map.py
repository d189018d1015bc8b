"""What can be asked of a map, and its text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpusync.errors import LayoutError
from gpusync.layout import Demotion, LayoutMap, PlacementClass, attach, named_tensors, storage_bytes, trace
from gpusync_kernels.cast import bind_casts, cast_segments
from gpusync_kernels.copy import copy_segments
from gpusync_kernels.moves import bind_moves
from support.models import ModelConfig, TinyModel, fresh_load, make_state, specs_of, tensor_bytes
from support.models_apply import assert_same
from support.models_case import Case
from support.models_layers import Ranks


def traced(config: ModelConfig, ranks: Ranks) -> LayoutMap:
    model = TinyModel(config, ranks)
    return trace(model, model.load_weights, specs_of(make_state(config)))


@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(2, 4), Ranks(1, 2, ep=True)])
@pytest.mark.parametrize("config", [ModelConfig(quantised=True), ModelConfig(tied=True)])
def test_a_map_and_its_text_are_the_same_thing(config, ranks):
    layout = traced(config, ranks)
    text = layout.to_json()
    assert LayoutMap.from_json(text) == layout
    assert LayoutMap.from_json(text).to_json() == text == traced(config, ranks).to_json()
    model = fresh_load(config, ranks, make_state(config))
    attached, _ = attach(layout, named_tensors(model))
    assert LayoutMap.from_json(attached.to_json()) == attached != layout


@pytest.mark.parametrize(
    "damage",
    [
        lambda read: read.pop("params"),
        lambda read: read["placements"]["proj.bias"].pop("kind"),
        lambda read: read["placements"]["proj.bias"].update(kind="none"),
        lambda read: read["placements"]["proj.bias"].update(pieces=3),
        lambda read: read["placements"]["proj.bias"].update(more=1),
        lambda read: read.update(storages=[]),
        lambda read: read.update(format=2),
    ],
)
def test_a_text_that_is_no_map_is_refused(damage):
    read = json.loads(traced(ModelConfig(), Ranks()).to_json())
    damage(read)
    with pytest.raises(LayoutError, match="layout map"):
        LayoutMap.from_json(json.dumps(read))
    with pytest.raises(LayoutError, match="layout map"):
        LayoutMap.from_json("{")


@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(3, 4), Ranks(1, 2, ep=True)])
def test_one_table_moves_all_direct_tensors_and_one_writes_all_casts(ranks):
    config = ModelConfig()
    old, new = make_state(config, 1), make_state(config, 2)
    layout = traced(config, ranks)
    model = fresh_load(config, ranks, old)
    params, names = named_tensors(model), list(new)
    sources = [tensor_bytes(new[name]) for name in names]
    table, storages = layout.segments(names)
    copy_segments(bind_moves(table, dst=storage_bytes(params, storages), src=sources))
    casts = layout.casts(names)
    assert (casts.storages, casts.dst_dtypes) == (("layers.1.router.bias.weight",), ("F32",))
    cast_segments(
        bind_casts(
            casts.table,
            dst=storage_bytes(params, casts.storages),
            dst_dtypes=casts.dst_dtypes,
            src=sources,
            src_dtypes=casts.src_dtypes,
        )
    )
    model.post_load()
    assert_same(model, fresh_load(config, ranks, new))


def test_tensors_that_are_not_patched_have_no_segments():
    config = ModelConfig(quantised=True)
    table, _ = traced(config, Ranks()).segments(["layers.0.quantised.weight", "mtp.layers.0.weight", "proj.bias"])
    assert table.rows["src"].tolist() == [2]


def test_the_segments_of_many_experts_are_one_each():
    config = ModelConfig(experts=64)
    names = [f"layers.1.experts.{n}.{part}_proj.weight" for n in range(64) for part in ("gate", "up", "down")]
    table, _ = traced(config, Ranks(1, 2)).segments(names)
    assert len(table) == len(names)
    assert np.array_equal(table.rows["src"], np.arange(len(names)))


def test_the_tensors_of_another_model_are_told_apart():
    config = ModelConfig()
    layout, specs = traced(config, Ranks(1, 2)), specs_of(make_state(config))
    layout.check_tensors(specs)
    wider = {**specs, "proj.bias": replace(specs["proj.bias"], shape=(21,))}
    with pytest.raises(LayoutError, match="another form") as caught:
        layout.check_tensors(wider)
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("proj.bias", "BF16[20]", "BF16[21]")
    with pytest.raises(LayoutError, match="another form"):
        layout.check_tensors({**specs, "proj.bias": replace(specs["proj.bias"], dtype="F16")})
    with pytest.raises(LayoutError, match="is missing") as caught:
        layout.check_tensors({name: spec for name, spec in specs.items() if name != "mtp.layers.0.weight"})
    assert caught.value.tensor == "mtp.layers.0.weight"
    with pytest.raises(LayoutError, match="no placement") as caught:
        layout.check_tensors({**specs, "more": specs["proj.bias"]})
    assert caught.value.tensor == "more"


def test_demoting_takes_replicas_along():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.p.data.copy_(d["y"])
        m.q.data.copy_(d["z"])

    layout = Case({"p": (3,), "q": (3,)}, load).trace({name: torch.zeros(3) for name in "xyz"})
    demoted = layout.demoted([Demotion(tensor="y", reason="it moved")])
    assert [demoted.placements[name].kind for name in "xyz"] == [
        PlacementClass.OPAQUE,
        PlacementClass.OPAQUE,
        PlacementClass.DIRECT,
    ]
    assert demoted.placements["x"].reason == "`y`, of which it is a replica: it moved"
    assert demoted.bytes_by_class() == {"direct": 12, "cast": 0, "derived": 0, "opaque": 12}
    assert layout.placements["y"].kind is PlacementClass.DIRECT


def test_modules_to_recompute_are_named_once():
    config = ModelConfig()
    layout = traced(config, Ranks())
    assert layout.derived_modules(make_state(config)) == []
    derived = {
        name: replace(placement, kind=PlacementClass.DERIVED, derives=name.split(".")[0])
        for name, placement in layout.placements.items()
    }
    layout = replace(layout, placements=derived)
    assert layout.derived_modules(["proj.bias", "embed.weight", "proj.weight", "mtp.layers.0.weight"]) == [
        "proj",
        "embed",
    ]
