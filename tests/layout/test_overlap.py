"""Two tensors, one place: replicas where they are the same in all, an error where they share only some bytes."""

from __future__ import annotations

import pytest
import torch

from gpusync.errors import LayoutError
from support.models_case import Case


def state(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(shape), "y": torch.ones(shape)}


def both_whole(m, d):
    m.p.data.copy_(d["x"])
    m.p.data.copy_(d["y"])


def test_tensors_loaded_to_the_same_places_are_replicas_of_the_last():
    layout = Case({"p": (4, 6)}, both_whole).trace(state(4, 6))
    first, last = layout.placements["x"], layout.placements["y"]
    assert (first.replica_of, last.replica_of) == ("y", None)
    assert (first.kind.value, first.is_patched, first.owned_bytes) == ("direct", False, 0)
    assert (last.is_patched, last.owned_bytes) == (True, 96)
    assert layout.bytes_by_class()["direct"] == 96
    table, _ = layout.segments(["x", "y"])
    assert table.rows["src"].tolist() == [1]


def test_the_order_of_loading_decides_which_one_stays():
    def load(m, d):
        both_whole(m, {"x": d["y"], "y": d["x"]})

    layout = Case({"p": (4, 6)}, load).trace(state(4, 6))
    assert layout.placements["y"].replica_of == "x"


def test_a_copy_made_twice_is_one_piece():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.p.data.copy_(d["x"])

    layout = Case({"p": (4, 6)}, load).trace({"x": torch.zeros(4, 6)})
    assert len(layout.placements["x"].pieces) == 1


def test_tensors_that_share_some_bytes_are_an_error():
    def load(m, d):
        m.p.data[:3].copy_(d["x"][:3])
        m.p.data[2:].copy_(d["y"][2:])

    with pytest.raises(LayoutError, match="two tensors are loaded into the same bytes of `p`") as caught:
        Case({"p": (4, 6)}, load).trace(state(4, 6))
    assert caught.value.tensor in ("x", "y")
    assert caught.value.expected == "byte 48 to be written once"


def test_the_same_place_in_another_order_is_an_error():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.p.data.copy_(d["y"].t())

    with pytest.raises(LayoutError, match="same bytes"):
        Case({"p": (4, 4)}, load).trace(state(4, 4))


def test_interleaved_tensors_are_apart():
    def load(m, d):
        m.p.data[:, ::2].copy_(d["x"])
        m.p.data[:, 1::2].copy_(d["y"])

    layout = Case({"p": (4, 6)}, load).check(state(4, 3))
    assert layout.untouched_bytes() == {}


def test_a_tensor_written_over_itself_is_opaque():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.p.data[:2].copy_(d["x"][2:])

    placement = Case({"p": (4, 6)}, load).trace({"x": torch.zeros(4, 6)}).placements["x"]
    assert placement.reason == "the loader writes it twice to the same bytes"


def test_an_overlap_with_an_opaque_tensor_is_no_error():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.own = d["x"]
        m.p.data[2:].copy_(d["y"][2:])

    layout = Case({"p": (4, 6)}, load).trace(state(4, 6))
    assert layout.placements["x"].kind.value == "opaque"
    assert layout.placements["y"].kind.value == "direct"
