"""Live bytes held against versions: what does not hold is demoted, and the version that serves is known or unknown."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.errors import LayoutError
from gpusync.layout import DerivedRegistry, attach, compare, identify, named_tensors, trace
from gpusync.stream import BytesSource
from support.models import ModelConfig, State, TinyModel, fresh_load, make_state, reader_of, specs_of, storage_bytes
from support.models_case import Case
from support.models_layers import Mla, Ranks

CONFIG = ModelConfig()
SECOND = Ranks(1, 2)


class Rank:
    """A loaded rank with the map that was traced for it."""

    def __init__(self, state: State, *, config: ModelConfig = CONFIG, ranks: Ranks = SECOND) -> None:
        derived = DerivedRegistry()
        derived.register(Mla, Mla.derive, params=("kv_b.*",))
        traced = TinyModel(config, ranks)
        layout = trace(traced, traced.load_weights, specs_of(state), derived=derived)
        self.model = fresh_load(config, ranks, state)
        self.layout, demotions = attach(layout, self.params)
        assert demotions == []

    @property
    def params(self):
        return named_tensors(self.model)

    def compare(self, state: State, **options: int):
        return compare(self.layout, self.params, reader_of(state), **options)

    def demoted(self, state: State) -> list[str]:
        return sorted(each.tensor for each in self.compare(state))

    def identify(self, **candidates: State):
        return identify(self.layout, self.params, [(label, reader_of(state)) for label, state in candidates.items()])


@pytest.fixture(scope="module")
def state() -> State:
    return make_state(CONFIG, 1)


@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(0, 2), Ranks(3, 4), Ranks(1, 2, ep=True)])
@pytest.mark.parametrize("window_bytes", [1, 2, 37, 256, 1 << 22])
def test_a_fresh_load_is_what_the_map_says(state, ranks, window_bytes):
    assert Rank(state, ranks=ranks).compare(state, window_bytes=window_bytes) == []


def owned_bytes(rank: Rank) -> Iterator[tuple[str, int]]:
    """(tensor, byte of its storage's) for every byte that a placement writes."""
    for name, placement in rank.layout.placements.items():
        for piece in placement.pieces:
            start, stop = piece.dst_span
            width = (stop - start) // (1 + sum((n - 1) * s for n, s in zip(piece.size, piece.dst_stride, strict=True)))
            for index in np.ndindex(*piece.size):
                element = piece.dst_offset + sum(i * s for i, s in zip(index, piece.dst_stride, strict=True))
                yield from ((name, (piece.param, element * width + byte)) for byte in range(width))


@settings(max_examples=40)
@given(st.data())
def test_any_byte_that_differs_is_noticed_and_named(data):
    state = make_state(CONFIG, 1)
    rank = Rank(state)
    name, (param, byte) = data.draw(st.sampled_from(list(owned_bytes(rank))))
    storage_bytes(rank.params[param])[byte] ^= 1 << data.draw(st.integers(0, 7))
    demotions = {each.tensor: each for each in rank.compare(state, window_bytes=data.draw(st.sampled_from([16, 4096])))}
    assert name in demotions
    assert f"of `{param}` is 0x" in demotions[name].reason
    others = demotions.keys() - {name}
    assert all("others of its parameter" in demotions[other].reason for other in others)
    assert {p.param for other in others for p in rank.layout.placements[other].pieces} <= {param}
    assert rank.identify(it=state) is None


def test_padding_is_not_compared(state):
    rank = Rank(state)
    padding = rank.model.embed.weight.data[9:]
    assert len(padding) == 3
    padding.fill_(5.0)
    assert rank.compare(state) == []


def test_the_reason_says_which_element_and_what_it_is(state):
    rank = Rank(state)
    rank.model.proj.bias.data[3] = 1.0
    (demotion,) = rank.compare({**state, "proj.bias": torch.full_like(state["proj.bias"], -2.0)})[:1]
    assert demotion.reason.startswith("live elements differ since the load: element 0 of `proj.bias` is 0x")
    assert demotion.reason.endswith("expected 0xc000")


def test_a_window_is_all_that_is_read_at_a_time(state):
    rank = Rank(state)
    reads: list[tuple[str, int, int]] = []

    class Watched(BytesSource):
        def __init__(self, name: str) -> None:
            super().__init__(reader_of(state)(name).data)
            self.name = name

        def read_into(self, offset, buffer):
            reads.append((self.name, offset, memoryview(buffer).nbytes))
            super().read_into(offset, buffer)

    assert compare(rank.layout, rank.params, Watched, window_bytes=64) == []
    assert max(nbytes for _, _, nbytes in reads) <= 64
    assert {name for name, _, _ in reads} == {n for n, p in rank.layout.placements.items() if p.pieces}


def test_a_mismatch_ends_the_reading_of_a_tensor(state):
    rank = Rank(state, ranks=Ranks())
    rank.model.proj.weight.data.zero_()
    read = []
    reader = reader_of(state)

    class Watched:
        def __init__(self, name):
            self.source = reader(name)
            self.nbytes = self.source.nbytes
            self.name = name

        def read_into(self, offset, buffer):
            read.append((self.name, offset))
            self.source.read_into(offset, buffer)

    assert identify(rank.layout, rank.params, [("it", Watched)], window_bytes=48) is None
    weights = [offset for name, offset in read if name == "proj.weight"]
    assert weights[0] == 0
    assert len(weights) == 1 + 480 // 48  # once to see it, once through to see that no other order would do


def test_experts_swapped_and_permuted_after_the_load_are_demoted_but_known():
    config = ModelConfig(rearranged=True)
    state, other = make_state(config, 1), make_state(config, 2)
    rank = Rank(state, config=config, ranks=Ranks(1, 2, ep=True))
    assert rank.identify(other=other, it=state) == "it"
    demotions = rank.compare(state)
    expected = {
        f"layers.1.experts.{n}.{part}_proj.{kind}"
        for n in (2, 3)
        for part in ("gate", "up")
        for kind in ("weight", "bias")
    }
    assert {each.tensor for each in demotions} == expected
    assert all(each.is_reordered for each in demotions)
    layout = rank.layout.demoted(demotions)
    assert layout.placements["layers.1.experts.2.gate_proj.weight"].kind.value == "opaque"
    assert layout.placements["layers.1.experts.2.down_proj.weight"].kind.value == "direct"
    assert compare(layout, rank.params, reader_of(state)) == []


def test_biases_that_are_all_the_same_are_doubted_where_their_weights_were_rearranged():
    # Swapped halves of zeros are zeros: nothing shows until a version changes them.
    config = ModelConfig(rearranged=True)
    state = make_state(config, 1)
    for name in list(state):
        if ".experts." in name and name.endswith(".bias"):
            state[name].zero_()
    state["proj.bias"].zero_()
    rank = Rank(state, config=config, ranks=Ranks())
    demotions = {each.tensor: each for each in rank.compare(state)}
    assert "its elements are all the same" in demotions["layers.1.experts.0.gate_proj.bias"].reason
    assert not demotions["layers.1.experts.0.gate_proj.bias"].is_reordered
    assert "proj.bias" not in demotions
    assert rank.identify(it=state) == "it"


def transpose(model):
    weight = model.layers[1].experts.w2_weight.data
    weight.copy_(weight.transpose(1, 2).contiguous().view_as(weight))


def swizzle(model):
    weight = model.proj.weight.data
    weight.copy_(weight.view(5, 2, 12).transpose(0, 1).contiguous().view_as(weight))


def permute_embedding(model):
    rows = model.embed.weight.data
    rows.copy_(rows.flip(0))


@pytest.mark.parametrize("rearrange", [transpose, swizzle])
def test_params_rearranged_in_place_are_told_from_another_version(state, rearrange):
    rank = Rank(state)
    rearrange(rank.model)
    demotions = rank.compare(state)
    assert demotions
    assert all(each.is_reordered for each in demotions)
    assert rank.identify(other=make_state(CONFIG, 2), it=state) == "it"


def test_what_is_moved_out_of_its_place_by_padding_is_not_known(state):
    rank = Rank(state)
    permute_embedding(rank.model)
    assert rank.demoted(state) == ["embed.weight"]
    assert rank.identify(it=state) is None


def test_scales_computed_anew_make_the_version_unknown(state):
    rank = Rank(state)
    rank.model.layers[1].experts.w2_scale.data.mul_(2)
    scales = [f"layers.1.experts.{n}.down_proj.scale" for n in range(4)]
    assert rank.demoted(state) == scales
    assert not any(each.is_reordered for each in rank.compare(state))
    assert rank.identify(it=state) is None


def test_the_version_that_serves_is_known_whichever_it_is(state):
    base, newer, newest = state, make_state(CONFIG, 2), make_state(CONFIG, 3)
    assert Rank(base).identify(mirror=newer, base=base) == "base"
    assert Rank(newer).identify(mirror=newer, base=base) == "mirror"
    assert Rank(newest).identify(mirror=newer, base=base) is None
    assert Rank(newest).identify() is None


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.router.bias.weight", "layers.1.mla.kv_b.weight"])
def test_one_tensor_makes_another_version(state, name):
    newer = {**state, name: state[name].roll(1, 0) + 1}
    assert Rank(newer).identify(mirror=state) is None
    assert Rank(newer).identify(mirror=state, other=newer) == "other"


def test_of_versions_with_the_same_bytes_here_the_first_is_named(state):
    newer = {**state, "mtp.layers.0.weight": state["mtp.layers.0.weight"] + 1}
    assert Rank(state).identify(first=newer, second=state) == "first"


def test_without_anything_to_go_by_no_version_is_known():
    module = Case({"p": (3,)}, lambda m, d: m.p.data.copy_(d["x"] * 1))
    layout = module.trace({"x": torch.zeros(3)})
    model = module.module()
    assert identify(layout, named_tensors(model), [("it", reader_of({"x": torch.zeros(3)}))]) is None


def test_casts_are_compared_by_what_the_loader_would_write(state):
    rank = Rank(state)
    name = "layers.1.router.bias.weight"
    assert rank.layout.placements[name].kind.value == "cast"
    rank.model.layers[1].router.bias.weight.data[1] += 1e-6
    assert rank.demoted(state) == [name]


def test_nan_and_negative_zero_are_bytes_like_others():
    state = make_state(CONFIG, 1)
    words = state["proj.bias"].view(torch.int16)
    words[:] = torch.tensor([0x7FC0, 0x7F81, -0x8000, 0, -1] * 4, dtype=torch.int16)
    rank = Rank(state)
    assert rank.compare(state) == []
    rank.model.proj.bias.data.view(torch.int16)[2] = 0  # +0.0 for -0.0
    assert rank.demoted(state) == ["proj.bias"]


def test_a_replica_has_to_have_its_owners_bytes():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.p.data.copy_(d["y"])

    module = Case({"p": (3,)}, load)
    same = {"x": torch.ones(3), "y": torch.ones(3)}
    layout, model = module.trace(same), module.module()
    module.load(model, same)
    assert compare(layout, named_tensors(model), reader_of(same)) == []
    apart = {**same, "x": torch.zeros(3)}
    demotions = compare(layout, named_tensors(model), reader_of(apart))
    assert [each.tensor for each in demotions] == ["x", "y"]
    assert "`y`, loaded over it, has other elements" in demotions[0].reason
    # It is what a load of that version gives; but with either of the two alone, nothing may be patched.
    assert identify(layout, named_tensors(model), [("it", reader_of(apart))]) == "it"
    assert identify(layout, named_tensors(model), [("it", reader_of({**apart, "y": torch.zeros(3)}))]) is None


def test_a_tensor_of_another_size_is_an_error(state):
    rank = Rank(state)
    with pytest.raises(LayoutError, match="another size") as caught:
        rank.compare({**state, "proj.bias": state["proj.bias"][:-1]})
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("proj.bias", 40, 38)


def test_a_param_that_is_gone_or_too_small_is_an_error(state):
    rank = Rank(state)
    rank.model.proj.bias.untyped_storage().resize_(6)
    with pytest.raises(LayoutError, match=r"`proj\.bias` is too small") as caught:
        rank.compare(state)
    assert (caught.value.expected, caught.value.found) == (20, 6)
    del rank.model.proj.bias
    with pytest.raises(LayoutError, match=r"`proj\.bias` is too small"):
        rank.compare(state)
