"""What a tensor met in a loader holds of the checkpoint: the algebra behind the trace, without torch.

A frame is a dense row-major array of elements, and boxes in it, each filled from one checkpoint tensor by strides. A
checkpoint tensor is a frame with one box; `clone`, `cat` and `pad` make frames out of frames. A strided view of a frame
is resolved to regions: boxes in the view's own coordinates.

    cat([q, k]) of q [2, 3] and k [1, 3]: a frame [3, 3] with box q at (0, 0) and box k at (2, 0);
    its last column: q's elements 2, 5 at index 0 of the view, k's element 2 at index 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Range = tuple[int, int]


class NotAffineError(Exception):
    """What a view shows of a frame is no strided box. Never leaves the trace: the tensor becomes opaque."""


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `start` to `start + size` of a frame, filled from elements of checkpoint tensor `name`."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    name: str
    src_offset: int
    src_stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a frame's elements, as torch gives it."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def permuted(self, order: Sequence[int]) -> View:
        return View(self.offset, tuple(self.size[d] for d in order), tuple(self.stride[d] for d in order))


@dataclass(frozen=True, slots=True)
class Frame:
    """Boxes do not overlap. What no box covers holds nothing of the checkpoint."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def is_covered(self) -> bool:
        return sum(math.prod(box.size) for box in self.boxes) == math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Steps:
    """A view, its dimensions split so that a step along one is the same step in the frame from everywhere.

    `dims` and `sizes`: per dimension the one of the view that it was split from, and its size; `digits`: its step along
    each dimension of the frame; `first`: the frame coordinates of the view's first element.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    digits: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]


def whole(name: str, numel: int) -> Frame:
    """A checkpoint tensor, contiguous, as a frame of one dimension: whatever its shape, views of it are strided."""
    return Frame((numel,), (Box((0,), (numel,), name, 0, (1,)),))


def resolve(frame: Frame, view: View) -> tuple[Steps, list[Box]]:
    """The view's dimensions as they had to be split, and what it holds as boxes in their coordinates.

    Raises NotAffineError where a step of the view would carry from one dimension of the frame into another.
    """
    steps = _steps(frame.shape, view)
    return steps, [region for box in frame.boxes for region in _regions(steps, box)]


def compose(frame: Frame, view: View) -> Frame:
    """The frame of a dense row-major copy of `view`. Its shape may have more dimensions than the view."""
    steps, boxes = resolve(frame, view)
    return _coalesced(Frame(steps.sizes, tuple(boxes)))


def join(parts: Sequence[tuple[Frame | None, View]], dim: int, shape: Sequence[int]) -> Frame:
    """The frame of views laid side by side along `dim` into a row-major array of `shape`. A part without a frame is
    nothing of the checkpoint. Raises NotAffineError.
    """
    boxes: list[Box] = []
    at = 0
    for frame, view in parts:
        if frame is not None:
            steps, regions = resolve(frame, view)
            if steps.dims != tuple(range(len(view.size))):
                raise NotAffineError("a part of a concatenation is no strided box")
            boxes += [replace(box, start=_moved(box.start, dim, at)) for box in regions]
        at += view.size[dim]
    return _coalesced(Frame(tuple(shape), tuple(boxes)))


def pad(frame: Frame, view: View, *, before: Sequence[int], shape: Sequence[int]) -> Frame:
    """The frame of an array of `shape` that holds `view` from index `before` on. Raises NotAffineError."""
    steps, regions = resolve(frame, view)
    if steps.dims != tuple(range(len(view.size))):
        raise NotAffineError("what is padded is no strided box")
    start = [tuple(a + b for a, b in zip(box.start, before, strict=True)) for box in regions]
    boxes = tuple(replace(box, start=at) for box, at in zip(regions, start, strict=True))
    return _coalesced(Frame(tuple(shape), boxes))


def rescaled(frame: Frame, numerator: int, denominator: int) -> Frame:
    """The frame counted in elements of another width: `numerator / denominator` of them for each. NotAffineError."""

    def scale(value: int) -> int:
        scaled, rest = divmod(value * numerator, denominator)
        if rest:
            raise NotAffineError("bytes are looked at as elements that they do not make up")
        return scaled

    if len(frame.shape) != 1 or any(box.src_stride != (1,) for box in frame.boxes):
        raise NotAffineError("bytes of a rearranged copy are looked at as another dtype")
    boxes = (Box((scale(b.start[0]),), (scale(b.size[0]),), b.name, scale(b.src_offset), (1,)) for b in frame.boxes)
    return Frame((scale(frame.shape[0]),), tuple(boxes))


def _moved(start: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*start[:dim], start[dim] + by, *start[dim + 1 :])


def _steps(shape: tuple[int, ...], view: View) -> Steps:
    dims, sizes, digits = [], [], []
    for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        for part_size, part_digits in _split(size, stride, shape):
            dims.append(dim)
            sizes.append(part_size)
            digits.append(part_digits)
    first = _digits(view.offset, shape)
    for axis, length in enumerate(shape if 0 not in sizes else ()):
        if first[axis] + sum((s - 1) * digit[axis] for s, digit in zip(sizes, digits, strict=True)) >= length:
            raise NotAffineError("a copy is taken apart across its rows")
    return Steps(tuple(dims), tuple(sizes), tuple(digits), first)


def _split(size: int, stride: int, shape: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """One dimension of a view as (size, digits) that each stay within one dimension of the frame, outermost first."""
    digits = _digits(stride, shape)
    axis = max((a for a, digit in enumerate(digits) if digit), default=None)
    if axis is None or size <= 1 or digits[axis] * (size - 1) < shape[axis] or shape[axis] % digits[axis]:
        return [(size, digits)]
    inner = shape[axis] // digits[axis]
    if inner <= 1 or size % inner:
        return [(size, digits)]
    return [*_split(size // inner, stride * inner, shape), (inner, digits)]


def _digits(value: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A row-major element number as coordinates; the first may lie outside."""
    digits = []
    for length in reversed(shape[1:]):
        value, digit = divmod(value, max(length, 1))
        digits.append(digit)
    return tuple(reversed([*digits, value])) if shape else ()


def _regions(steps: Steps, box: Box) -> Iterator[Box]:
    """The parts of the view that lie in the box, with the view's coordinates for `start`."""
    parts: list[list[Range]] = [[(0, size) for size in steps.sizes]]
    for axis, (low, length) in enumerate(zip(box.start, box.size, strict=True)):
        along = [digit[axis] for digit in steps.digits]
        inside = (low - steps.first[axis], low + length - steps.first[axis])
        parts = [cut for part in parts for cut in _cut(part, along, inside)]
    src_stride = tuple(sum(d * s for d, s in zip(digit, box.src_stride, strict=True)) for digit in steps.digits)
    for part in parts:
        start = tuple(low for low, _ in part)
        offset = box.src_offset + sum(low * step for low, step in zip(start, src_stride, strict=True))
        offset += sum((f - b) * s for f, b, s in zip(steps.first, box.start, box.src_stride, strict=True))
        yield Box(start, tuple(high - low for low, high in part), box.name, offset, src_stride)


def _cut(part: list[Range], along: Sequence[int], inside: Range) -> Iterator[list[Range]]:
    """The parts of `part` whose coordinate `sum(index * along)` lies in `inside`, each a range of every index."""
    if any(low >= high for low, high in part):
        return
    least = sum(low * step for (low, _), step in zip(part, along, strict=True))
    most = sum((high - 1) * step for (_, high), step in zip(part, along, strict=True))
    if most < inside[0] or least >= inside[1]:
        return
    if inside[0] <= least and most < inside[1]:
        yield part
        return
    dim = max((d for d, (low, high) in enumerate(part) if high - low > 1), key=lambda d: along[d])
    (low, high), step = part[dim], along[dim]
    rest = most - least - (high - 1 - low) * step
    zero = least - low * step  # the coordinate of index 0 where all others are least

    def clip(first: int, last: int) -> Range:
        """The indices whose coordinate, of the others' least, lies in [first, last]."""
        return max(low, -((zero - first) // step)), min(high, (last - zero) // step + 1)

    wholly, partly = clip(inside[0], inside[1] - 1 - rest), clip(inside[0] - rest, inside[1] - 1)
    some = wholly[0] < wholly[1]
    if some:
        yield [*part[:dim], wholly, *part[dim + 1 :]]
    for index in [*range(partly[0], wholly[0]), *range(wholly[1], partly[1])] if some else range(*partly):
        yield from _cut([*part[:dim], (index, index + 1), *part[dim + 1 :]], along, inside)


def _coalesced(frame: Frame) -> Frame:
    """The same in as few dimensions as hold it: two that every box fills and runs through as one are one."""
    for axis in reversed(range(len(frame.shape) - 1)):
        length = frame.shape[axis + 1]
        if all(
            box.size[axis + 1] == length
            and (1 in (box.size[axis], length) or box.src_stride[axis] == box.src_stride[axis + 1] * length)
            for box in frame.boxes
        ):
            frame = Frame(
                (*frame.shape[:axis], frame.shape[axis] * length, *frame.shape[axis + 2 :]),
                tuple(_merged(box, axis, length) for box in frame.boxes),
            )
    return frame


def _merged(box: Box, axis: int, length: int) -> Box:
    stride = box.src_stride[axis + 1] if length != 1 else box.src_stride[axis]
    return Box(
        (*box.start[:axis], box.start[axis] * length, *box.start[axis + 2 :]),
        (*box.size[:axis], box.size[axis] * length, *box.size[axis + 2 :]),
        box.name,
        box.src_offset,
        (*box.src_stride[:axis], stride, *box.src_stride[axis + 2 :]),
    )
