"""What the tensors that a loader handles hold of the checkpoint, followed through views, copies and concatenations.

Nothing here computes with elements: tensors are looked at for their form alone. Where the elements cannot be followed,
NotAffineError is raised, whose text is the reason why a tensor is opaque.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gpusync.layout.dtypes import can_cast
from gpusync.layout.frames import Frame, NotAffineError, Steps, View, compose, join, pad, rescaled, resolve, whole
from gpusync.layout.placement import Piece
from gpusync.layout.targets import dtype_name


@dataclass(slots=True, kw_only=True)
class Held:
    """`frame` is None where the elements were computed. `dtype` is that of the checkpoint's elements, `stored` of those
    in the storage; they differ where the loader has converted.

    `tensor` keeps the storage: its key must not come to mean another one. `is_source`: it is the checkpoint's own.
    `unused`: the storage was there before, and nothing has come from it since; the loader may want it for itself.
    """

    names: frozenset[str]
    frame: Frame | None
    dtype: torch.dtype
    stored: torch.dtype
    tensor: torch.Tensor
    is_source: bool = False
    unused: bool = False


def hold_source(name: str, tensor: torch.Tensor) -> Held:
    frame = whole(name, tensor.numel())
    names = frozenset((name,))
    return Held(names=names, frame=frame, dtype=tensor.dtype, stored=tensor.dtype, tensor=tensor, is_source=True)


def hold_computed(names: frozenset[str], tensor: torch.Tensor) -> Held:
    return Held(names=names, frame=None, dtype=tensor.dtype, stored=tensor.dtype, tensor=tensor)


def hold_copy(held: Held, source: torch.Tensor, copy: torch.Tensor) -> Held:
    """`copy`, a dense tensor with a storage of its own, gets the elements of `source`."""
    order = _dense_order(copy)
    frame, dtype = _seen_as(held, source)
    _check_conversion(dtype, source.dtype, copy.dtype)
    frame = compose(frame, _view(source).permuted(order))
    return Held(names=_names(frame), frame=frame, dtype=dtype, stored=copy.dtype, tensor=copy)


def hold_concatenation(parts: Sequence[tuple[Held | None, torch.Tensor]], dim: int, joined: torch.Tensor) -> Held:
    """`joined`, contiguous, gets the parts side by side; a part that is not held is nothing of the checkpoint."""
    seen = [(None if held is None else _seen_as(held, tensor), tensor) for held, tensor in parts]
    dtypes = {frame_dtype[1] for frame_dtype, _ in seen if frame_dtype is not None}
    if len(dtypes) != 1 or any(tensor.dtype != joined.dtype for _, tensor in parts):
        raise NotAffineError("the loader joins tensors of several dtypes")
    views = [(None if frame_dtype is None else frame_dtype[0], _view(tensor)) for frame_dtype, tensor in seen]
    frame = join(views, dim, joined.shape)
    return Held(names=_names(frame), frame=frame, dtype=dtypes.pop(), stored=joined.dtype, tensor=joined)


def hold_padded(held: Held, source: torch.Tensor, before: Sequence[int], padded: torch.Tensor) -> Held:
    """`padded`, contiguous, gets `source` from index `before` on."""
    frame, dtype = _seen_as(held, source)
    frame = pad(frame, _view(source), before=before, shape=padded.shape)
    return Held(names=_names(frame), frame=frame, dtype=dtype, stored=padded.dtype, tensor=padded)


def pieces_of(held: Held, source: torch.Tensor, *, param: str, target: torch.Tensor) -> list[tuple[str, Piece]]:
    """What `target.copy_(source)` writes of which tensor, for a `target` in the storage of `param`, and `source`
    expanded to its shape.
    """
    frame, dtype = _seen_as(held, source)
    _check_conversion(dtype, source.dtype, target.dtype)
    steps, boxes = resolve(frame, _view(source))
    offset = int(target.storage_offset())
    stride = _split_strides(steps, target.stride())
    return [
        (
            box.name,
            Piece(
                param=param,
                dtype=dtype_name(dtype),
                converts=None if dtype == target.dtype else dtype_name(target.dtype),
                size=box.size,
                src_offset=box.src_offset,
                src_stride=box.src_stride,
                dst_offset=offset + sum(a * s for a, s in zip(box.start, stride, strict=True)),
                dst_stride=stride,
            ),
        )
        for box in boxes
    ]


def is_whole(tensor: torch.Tensor) -> bool:
    """True where the tensor is all there is in its storage, each element once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and _is_dense(tensor)


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _names(frame: Frame) -> frozenset[str]:
    return frozenset(box.name for box in frame.boxes)


def _seen_as(held: Held, tensor: torch.Tensor) -> tuple[Frame, torch.dtype]:
    """The frame counted in elements of `tensor`, a view of the held storage, and the dtype of the source's elements."""
    if held.frame is None:
        raise NotAffineError("the loader computes it")
    if tensor.is_conj() or tensor.is_neg():
        raise NotAffineError("the loader negates it")
    if tensor.dtype == held.stored:
        return held.frame, held.dtype
    if held.dtype != held.stored:
        raise NotAffineError("the loader converts it and looks at the result as another dtype")
    if tensor.dtype.itemsize == held.stored.itemsize:
        return held.frame, tensor.dtype
    return rescaled(held.frame, held.stored.itemsize, tensor.dtype.itemsize), tensor.dtype


def _check_conversion(dtype: torch.dtype, stored: torch.dtype, target: torch.dtype) -> None:
    """Checkpoint elements of `dtype`, stored as `stored`, are copied to `target`."""
    if stored == target:
        return
    if dtype != stored:
        raise NotAffineError(f"the loader converts it twice, to {dtype_name(stored)} and to {dtype_name(target)}")
    if not can_cast(dtype_name(dtype), dtype_name(target)):
        raise NotAffineError(f"the loader converts it from {dtype_name(dtype)} to {dtype_name(target)}")


def _dense_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    if not is_whole(tensor):
        raise NotAffineError("the loader copies it into a part of a temporary tensor")
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _split_strides(steps: Steps, stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor's dimensions, split as `steps` splits them."""

    def reversed_strides() -> Iterator[int]:
        inner = dict.fromkeys(steps.dims, 1)
        for dim, size in zip(reversed(steps.dims), reversed(steps.sizes), strict=True):
            yield stride[dim] * inner[dim]
            inner[dim] *= size

    return tuple(reversed(list(reversed_strides())))
