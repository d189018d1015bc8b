"""What loaders do with a tensor on its way into a param: followed exactly, or opaque with the reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from gpusync.layout import trace
from gpusync.stream import TensorSpec
from support.models_case import Case
from support.models_views import bases, views

F32, BF16, F16, F8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def x_and_y() -> dict[str, torch.Tensor]:
    return {"x": numbers(4, 6), "y": numbers(4, 6, seed=1)}


def halves_by_foreach(m, d):
    torch._foreach_copy_([m.p.data[:2], m.p.data[2:]], [d["x"][2:], d["x"][:2]])


def copied_into_a_buffer_first(m, d):
    buffer = torch.empty(4, 6)
    buffer.copy_(d["x"])
    m.p.data.copy_(buffer)


def heads_interleaved(m, d):
    m.p.data.view(2, 2, 6).copy_(d["x"].view(2, 2, 6).transpose(0, 1))


def rope_permuted(m, d):
    m.p.data.copy_(d["x"].view(2, 2, 6).permute(1, 0, 2).reshape(4, 6))


COPIES = {
    "copy_": lambda m, d: m.p.data.copy_(d["x"]),
    "copy_ under no_grad": lambda m, d: m.p.copy_(d["x"]),
    "assigned whole": lambda m, d: m.p.data.__setitem__(Ellipsis, d["x"]),
    "assigned row by row": lambda m, d: [m.p.data.__setitem__(i, d["x"][i]) for i in range(4)],
    "assigned column by column": lambda m, d: [m.p.data[:, i].copy_(d["x"][:, i]) for i in range(6)],
    "narrowed": lambda m, d: m.p.data.narrow(1, 1, 3).narrow(0, 2, 2).copy_(d["x"].narrow(1, 2, 3).narrow(0, 1, 2)),
    "every other": lambda m, d: m.p.data[::2, ::3].copy_(d["x"][1::2, 1::3]),
    "transposed twice": lambda m, d: m.p.data.t().copy_(d["x"].t()),
    "flattened": lambda m, d: m.p.data.view(-1).copy_(d["x"].flatten()),
    "in halves, swapped": halves_by_foreach,
    "chunked": lambda m, d: [m.p.data.chunk(2)[1 - i].copy_(c) for i, c in enumerate(d["x"].chunk(2))],
    "unbound": lambda m, d: [m.p.data[i].copy_(row) for i, row in enumerate(d["x"].unbind())],
    "one row for all": lambda m, d: m.p.data.copy_(d["x"][2]),
    "one element for all": lambda m, d: m.p.data.copy_(d["x"][2, 3]),
    "a number for all": lambda m, d: m.p.data[1].fill_(d["x"][2, 3].item()),
    "cloned": lambda m, d: m.p.data.copy_(d["x"].clone()),
    "made contiguous and sliced": lambda m, d: m.p.data[:3, :4].copy_(d["x"].t().contiguous()[1:4, :4]),
    "reshaped across heads": rope_permuted,
    "viewed across heads": heads_interleaved,
    "moved to a device": lambda m, d: m.p.data.copy_(d["x"].to("cpu", copy=True)[:]),
    "through a buffer": copied_into_a_buffer_first,
    "concatenated": lambda m, d: m.p.data.copy_(torch.cat([d["y"][1:2], d["x"][1:], d["x"][:0]])),
    "concatenated on the inner dimension": lambda m, d: m.p.data.copy_(torch.cat([d["y"][:, :1], d["x"][:, 1:]], 1)),
    "concatenated, then sliced": lambda m, d: m.p.data.copy_(torch.cat([d["x"], d["y"]])[2:6]),
    "concatenated, then every third": lambda m, d: m.p.data[:2].copy_(torch.cat([d["x"], d["y"]])[1::4]),
    "concatenated and transposed": lambda m, d: m.p.data.view(6, 4).copy_(torch.cat([d["x"], d["y"]]).t()[:, 2:6]),
    "concatenated and concatenated": lambda m, d: m.p.data.copy_(
        torch.cat([torch.cat([d["x"], d["y"]])[3:5], d["y"][2:]])
    ),
    "concatenated with something else": lambda m, d: m.p.data[:, :4].copy_(
        torch.cat([torch.full((4, 1), 7.0), d["x"][:, :3]], 1)
    ),
    "stacked": lambda m, d: m.p.data.copy_(torch.stack([d["x"], d["y"]], dim=1)[:, 1]),
    "stacked, all of it": lambda m, d: m.p.data.view(2, 2, 6).copy_(torch.stack([d["x"][:2], d["y"][:2]])),
    "padded": lambda m, d: m.p.data.copy_(functional.pad(d["x"][:3, :5], (0, 1, 1, 0), value=7.0)),
    "bytes": lambda m, d: m.p.data.view(torch.uint8).copy_(d["x"].view(torch.uint8)),
    "integers": lambda m, d: m.p.data.view(torch.int32).copy_(d["x"].view(torch.int32)),
    "rows of a transposed copy, two by two": lambda m, d: m.p.data.view(3, 8).copy_(d["x"].t().contiguous().view(3, 8)),
    "integers, transposed": lambda m, d: m.p.data.view(torch.int32).copy_(
        d["x"].view(torch.int32).view(6, 4).t().contiguous()
    ),
}


@pytest.mark.parametrize("load", COPIES.values(), ids=COPIES)
def test_a_loader_that_only_moves_elements_is_followed(load):
    layout = Case({"p": (4, 6)}, load).check(x_and_y())
    assert {each.kind.value for each in layout.placements.values()} == {"direct"}


CASTS = {
    "by copy_": lambda m, d: m.p.data.copy_(d["x"]),
    "by float()": lambda m, d: m.p.data.copy_(d["x"].float()),
    "by to(), then sliced": lambda m, d: m.p.data[:, 1:].copy_(d["x"].to(m.p.dtype)[:, 1:]),
    "by to() of the param": lambda m, d: m.p.data.copy_(d["x"].to(m.p)),
    "transposed": lambda m, d: m.p.data.view(6, 4).copy_(d["x"].t()),
    "concatenated after it": lambda m, d: m.p.data.copy_(torch.cat([d["x"][:2].float(), d["x"][2:].float()])),
    "a number": lambda m, d: m.p.data[:1, :1].fill_(d["x"][1, 1].item()),
}


@pytest.mark.parametrize("load", CASTS.values(), ids=CASTS)
def test_a_conversion_of_floats_is_a_cast(load):
    layout = Case({"p": (4, 6)}, load).check({"x": numbers(4, 6, dtype=BF16)})
    assert layout.placements["x"].kind.value == "cast"
    assert {(piece.dtype, piece.converts) for piece in layout.placements["x"].pieces} == {("BF16", "F32")}


@pytest.mark.parametrize(("source", "target"), [(F32, BF16), (F32, F16), (F16, BF16), (BF16, F16), (F8, BF16)])
def test_any_pair_of_floats_that_can_be_written_by_value(source, target):
    layout = Case({"p": ((4, 6), target)}, COPIES["copy_"]).check({"x": numbers(4, 6, dtype=source)})
    assert layout.placements["x"].kind.value == "cast"


def test_a_tensor_may_be_direct_in_one_place_and_cast_in_another():
    def load(m, d):
        m.p.data.copy_(d["x"])
        m.q.data.copy_(d["x"])

    layout = Case({"p": ((3,), BF16), "q": ((3,), F32)}, load).check({"x": numbers(3, dtype=BF16)})
    assert layout.placements["x"].kind.value == "cast"
    assert layout.placements["x"].owned_bytes == 12


def keeps_it(m, d):
    m.own = {"weights": [d["x"]]}


def keeps_a_copy(m, d):
    m.own = d["x"].t().contiguous()


def copies_it_into_what_is_its_own(m, d):
    m.own = torch.zeros(4, 6)
    m.own.copy_(d["x"])


def reads_a_number(m, d):
    m.p.data.fill_(d["x"][0, 0].item() * 2)


def decides_by_a_number(m, d):
    if d["x"][0, 0].item() > 1:
        m.p.data.copy_(d["x"])


def changes_it_first(m, d):
    d["x"][0].zero_()
    m.p.data.copy_(d["x"])


def fills_a_part_of_a_buffer(m, d):
    buffer = torch.zeros(8, 6)
    buffer[:4].copy_(d["x"])
    m.p.data.copy_(buffer[:4])


def overwrites_it(m, d):
    m.p.data.copy_(d["x"])
    m.p.data[1:2].zero_()


def scales_the_param(m, d):
    m.p.data.copy_(d["x"])
    m.p.data.mul_(2)


COMPUTED = {
    "aten.mul.Tensor": lambda m, d: m.p.data.copy_(d["x"] * 2),
    "aten.neg.default": lambda m, d: m.p.data.copy_(-d["x"]),
    "aten.add_.Tensor": lambda m, d: m.p.data.add_(d["x"]),
    "aten.index.Tensor": lambda m, d: m.p.data.copy_(d["x"][torch.tensor([3, 2, 1, 0])]),
    "aten.index_put_.default": lambda m, d: m.p.data.__setitem__(torch.tensor([0, 1]), d["x"][:2]),
    "aten.repeat.default": lambda m, d: m.p.data.copy_(d["x"][:2].repeat(2, 1)),
    "aten.mul.out": lambda m, d: torch.mul(d["x"], 2, out=m.p.data),
    "keeps it as `own`": keeps_it,
    "the loader keeps it as `own`": keeps_a_copy,
    "the loader copies it into a tensor that is no parameter": copies_it_into_what_is_its_own,
    "reads it as a number": reads_a_number,
    "the loader reads it as a number": decides_by_a_number,
    "aten.zero_.default": changes_it_first,
    "a part of a temporary tensor": fills_a_part_of_a_buffer,
    "aten.zero_.default overwrites it": overwrites_it,
    "aten.mul_.Tensor overwrites it": scales_the_param,
    "converts it from F32 to F8_E4M3": lambda m, d: m.q.data.copy_(d["x"]),
    "converts it from F32 to I64": lambda m, d: m.p.data.copy_(d["x"].long()),
    "converts it twice, to BF16 and to F32": lambda m, d: m.p.data.copy_(d["x"].bfloat16()),
    "across its rows": lambda m, d: m.p.data.copy_(d["x"].t().contiguous().view(4, 6)),
    "several dtypes": lambda m, d: m.p.data.copy_(torch.cat([d["x"][:2].bfloat16(), d["x"][2:]])),
    "RuntimeError: The expanded size": lambda m, d: m.p.data.copy_(d["x"][:, :5]),
}


@pytest.mark.parametrize("reason", COMPUTED)
def test_a_loader_that_does_anything_else_makes_the_tensor_opaque(reason):
    assert reason in Case({"p": (4, 6), "q": ((4, 6), F8)}, COMPUTED[reason]).reason({"x": numbers(4, 6)})


def test_a_tensor_that_is_only_looked_at_by_its_form_stays_direct():
    def load(m, d):
        m.p.data.copy_(torch.empty_like(d["x"]).copy_(d["x"]))
        assert d["x"].shape[0] == 4

    Case({"p": (4, 6)}, load).check({"x": numbers(4, 6)})


def test_what_is_written_before_a_tensor_does_not_matter():
    def load(m, d):
        m.p.data.zero_()
        m.p.data[:3].copy_(d["x"][:3])

    layout = Case({"p": (4, 6)}, load).trace({"x": numbers(4, 6)})
    assert layout.placements["x"].kind.value == "direct"
    assert layout.untouched_bytes() == {"p": 24}


def test_others_in_the_same_param_are_not_concerned():
    def load(m, d):
        m.p.data[:2].copy_(d["x"][:2] + 1)
        m.p.data[2:].copy_(d["y"][2:])

    layout = Case({"p": (4, 6)}, load).trace(x_and_y())
    assert layout.placements["x"].kind.value == "opaque"
    assert layout.placements["y"].kind.value == "direct"


def test_what_an_opaque_tensor_has_overwritten_is_opaque_too():
    def load(m, d):
        m.p.data.copy_(d["y"])
        m.p.data[:2].copy_(d["x"][:2])
        m.q = d["x"]

    layout = Case({"p": (4, 6)}, load).trace(x_and_y())
    assert layout.placements["y"].reason == "tensor `x` overwrites it after it was loaded"


def test_a_dtype_that_torch_does_not_have_is_opaque():
    module = Case({"p": (4,)}, COPIES["copy_"])
    forms = {
        "a": TensorSpec(name="a", dtype="F6_E2M3", shape=(4,), nbytes=3),
        "b": TensorSpec(name="b", dtype="F4", shape=(3,), nbytes=2),
    }
    layout = trace(module.module(), lambda weights: None, forms)
    assert layout.placements["a"].reason == "torch has no dtype F6_E2M3"
    assert layout.placements["b"].reason == "an F4 tensor does not consist of pairs"


def test_a_table_that_would_be_too_large_is_opaque(monkeypatch):
    monkeypatch.setattr("gpusync.layout.tracing.MAX_SEGMENTS", 5)
    scattered = lambda m, d: m.p.data.view(2, 3, 4).copy_(d["x"].view(4, 3, 2).permute(2, 1, 0))  # noqa: E731
    assert "6 scattered parts" in Case({"p": (4, 6)}, scattered).reason({"x": numbers(4, 6)})


def strided(like: torch.Tensor):
    """The view of a tensor that `like` is of its base."""
    return lambda base: base.as_strided(like.shape, like.stride(), like.storage_offset())


@given(st.data())
def test_any_view_of_any_copy_of_any_view_goes_where_a_load_puts_it(data):
    base = data.draw(bases())
    view = data.draw(views(base, expands=True))
    copies = data.draw(st.booleans())
    copied = view.clone() if copies else view
    again = data.draw(views(copied, expands=True)) if copies else view
    order = data.draw(st.permutations(range(again.dim())))
    room = torch.zeros([again.shape[d] + data.draw(st.integers(0, 2)) for d in order])
    target = room[tuple(slice(0, again.shape[d]) for d in order)].permute([order.index(d) for d in range(again.dim())])

    def load(m, d):
        held = strided(view)(d["x"])
        strided(target)(m.p.data).copy_(strided(again)(held.clone()) if copies else held)

    case = Case({"p": tuple(room.shape)}, load)
    state = {"x": base.float()}
    placement = case.trace(state).placements["x"]
    if placement.reason is not None:
        assert "across its rows" in placement.reason
    else:
        case.check(state)
