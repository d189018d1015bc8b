"""Frames against the same operations on tensors whose elements are their own numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gpusync.layout.frames import Frame, NotAffineError, View, compose, join, pad, rescaled, resolve, whole
from support.models_views import bases, views

APART = 1000  # tensor n has the elements n * APART and on


def view_of(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def elements(frame: Frame) -> torch.Tensor:
    """What the frame says its elements are; -1 where it says nothing."""
    filled = torch.full(frame.shape, -1)
    for box in frame.boxes:
        first = int(box.name) * APART + box.src_offset
        numbers = torch.arange(first + 1 + sum((n - 1) * s for n, s in zip(box.size, box.src_stride, strict=True)))
        target = filled[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        assert target.shape == box.size
        assert (target == -1).all()
        target.copy_(numbers.as_strided(box.size, box.src_stride, first))
    return filled.reshape(-1)


def source(number: int, tensor: torch.Tensor) -> Frame:
    return whole(str(number), tensor.numel())


@given(st.data())
def test_a_copy_of_any_view_of_a_checkpoint_tensor_is_followed(data):
    base = data.draw(bases())
    view = data.draw(views(base, expands=True))
    frame = compose(source(0, base), view_of(view))
    assert elements(frame).tolist() == view.flatten().tolist()
    assert frame.is_covered


@given(st.data())
def test_a_view_of_a_copy_is_followed_or_refused(data):
    base = data.draw(bases())
    view = data.draw(views(base))
    copy = view.clone(memory_format=torch.contiguous_format)
    frame = compose(source(0, base), view_of(view))
    again = data.draw(views(copy, expands=True))
    try:
        found = compose(frame, view_of(again))
    except NotAffineError:
        assume(False)
    assert elements(found).tolist() == again.flatten().tolist()


@given(st.data())
def test_a_view_of_a_concatenation_is_followed_or_refused(data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dim = data.draw(st.integers(0, 1))
    parts = []
    for number in range(data.draw(st.integers(1, 3))):
        size = list(shape)
        size[dim] = data.draw(st.integers(1, 4))
        base = torch.arange(size[0] * size[1]).reshape(size) + number * APART
        transposed = data.draw(st.booleans())
        parts.append((number, base.t().contiguous().t() if transposed else base))
    joined = torch.cat([part for _, part in parts], dim)
    frames = [(source(number, part), View(0, tuple(part.shape), tuple(part.stride()))) for number, part in parts]
    frame = join(frames, dim, joined.shape)
    numbers = torch.cat([_by_memory(number, part) for number, part in parts], dim)
    assert elements(frame).tolist() == numbers.flatten().tolist()
    view = data.draw(views(numbers.contiguous(), expands=True))
    try:
        found = compose(frame, view_of(view))
    except NotAffineError:
        assume(False)
    assert elements(found).tolist() == view.flatten().tolist()


def _by_memory(number: int, part: torch.Tensor) -> torch.Tensor:
    """The part with, for its elements, their places in its memory: that is what a frame numbers."""
    return torch.arange(part.numel()).as_strided(part.shape, part.stride()) + number * APART


@given(st.data())
def test_a_view_of_something_padded_holds_what_it_shows_of_the_tensor(data):
    base = data.draw(bases())
    before = [data.draw(st.integers(0, 2)) for _ in base.shape]
    after = [data.draw(st.integers(0, 2)) for _ in base.shape]
    shape = [b + size + a for b, size, a in zip(before, base.shape, after, strict=True)]
    padded = torch.full(shape, -1)
    padded[tuple(slice(b, b + size) for b, size in zip(before, base.shape, strict=True))] = base
    frame = pad(source(0, base), view_of(base), before=before, shape=shape)
    assert elements(frame).tolist() == padded.flatten().tolist()
    assert frame.is_covered == (-1 not in padded)
    view = data.draw(views(padded))
    try:
        found = compose(frame, view_of(view))
    except NotAffineError:
        assume(False)
    assert elements(found).tolist() == view.flatten().tolist()


def test_the_worked_example():
    frame = join([(whole("q", 6), View(0, (2, 3), (3, 1))), (whole("k", 3), View(0, (1, 3), (3, 1)))], 0, (3, 3))
    _, regions = resolve(frame, View(2, (3,), (3,)))
    assert [(r.name, r.start, r.size, r.src_offset, r.src_stride) for r in regions] == [
        ("q", (0,), (2,), 2, (3,)),
        ("k", (2,), (1,), 2, (3,)),
    ]


def test_a_concatenation_of_whole_rows_needs_one_dimension():
    frame = join([(whole("q", 6), View(0, (2, 3), (3, 1))), (whole("k", 3), View(0, (1, 3), (3, 1)))], 0, (3, 3))
    assert (frame.shape, [box.start for box in frame.boxes]) == ((9,), [(0,), (6,)])


def test_rows_of_a_transposed_copy_cannot_be_taken_apart_across_each_other():
    frame = compose(whole("0", 24), View(0, (6, 4), (1, 6)))
    with pytest.raises(NotAffineError, match="across its rows"):
        resolve(frame, View(0, (4, 6), (6, 1)))


def test_elements_of_another_width():
    assert rescaled(whole("0", 6), 4, 2) == whole("0", 12)
    assert rescaled(whole("0", 6), 2, 4) == whole("0", 3)
    with pytest.raises(NotAffineError, match="do not make up"):
        rescaled(whole("0", 5), 2, 4)
    with pytest.raises(NotAffineError, match="rearranged"):
        rescaled(compose(whole("0", 24), View(0, (6, 4), (1, 6))), 2, 1)


def test_large_frames_are_cut_without_walking_them():
    rows = 1 << 40
    parts = [(whole("0", 2 * rows), View(0, (rows, 2), (2, 1))), (whole("1", 2 * rows), View(0, (rows, 2), (2, 1)))]
    frame = join(parts, 0, (2 * rows, 2))
    _, regions = resolve(frame, View(2, (2 * rows - 1, 2), (2, 1)))
    assert [region.size for region in regions] == [(rows - 1, 2), (rows, 2)]
