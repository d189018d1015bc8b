"""Random strided views, for property tests: what loaders do to tensors, without looking at elements."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor, *, steps: int = 4, expands: bool = False) -> torch.Tensor:
    """A view of `base` after a few slices, transposes, splits and merges of dimensions; with `expands`, some of its
    elements may appear more than once. Never empty.
    """
    view = base
    for _ in range(draw(st.integers(0, steps))):
        view = draw(_steps(view, expands=expands))
    return view


@st.composite
def _steps(draw: st.DrawFn, view: torch.Tensor, *, expands: bool) -> torch.Tensor:
    kind = draw(st.sampled_from(["slice", "slice", "transpose", "split", "merge", "select", "expand"]))
    if view.dim() == 0:
        return view.expand(draw(st.integers(1, 3))) if expands else view.unsqueeze(0)
    dim = draw(st.integers(0, view.dim() - 1))
    size = view.shape[dim]
    if kind == "slice":
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        return view.narrow(dim, start, length)[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
    if kind == "transpose":
        return view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
    if kind == "split":
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        return view.unflatten(dim, (factor, size // factor))
    if kind == "select":
        return view.select(dim, draw(st.integers(0, size - 1)))
    if kind == "expand" and expands and view.dim() < 4:
        return view.unsqueeze(dim).expand(*view.shape[:dim], draw(st.integers(1, 3)), *view.shape[dim:])
    if kind == "merge" and dim + 1 < view.dim() and view.stride(dim) == view.stride(dim + 1) * view.shape[dim + 1]:
        return view.flatten(dim, dim + 1)
    return view


@st.composite
def bases(draw: st.DrawFn, *, most: int = 60, first: int = 0) -> torch.Tensor:
    """A contiguous int64 tensor of one to three dimensions whose elements are their own numbers, from `first` on."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda s: torch.Size(s).numel() <= most))
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
