"""Where one tensor's elements live in this rank's params: exact affine pieces, and how they came there.

A piece is a strided box: element `index` of it comes from element `src_offset + sum(index * src_stride)` of the tensor
and lives at element `dst_offset + sum(index * dst_stride)` of a param's storage.

    rows 2..3 of a [4, 3] tensor, held transposed in a param [3, 2] of its own:
    size=(2, 3)   src_offset=6 src_stride=(3, 1)   dst_offset=0 dst_stride=(1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from gpusync.layout.dtypes import element_width


class PlacementClass(str, Enum):
    """What a commit can do about a changed tensor."""

    DIRECT = "direct"
    """Its bytes stand in the params unchanged: patched in place."""
    CAST = "cast"
    """Some of them were converted by the loader: written by value."""
    DERIVED = "derived"
    """As the pieces say, and a registered function recomputes what the engine derived from them."""
    OPAQUE = "opaque"
    """Anything else: only the engine's own reload gets it right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`param` is the name of the destination's storage. Offsets and strides count elements of `dtype` on the source's
    side, and on the destination's of `converts`, the dtype it is converted to, or of `dtype` where that is None.
    """

    param: str
    dtype: str
    converts: str | None = None
    size: tuple[int, ...]
    src_offset: int
    src_stride: tuple[int, ...]
    dst_offset: int
    dst_stride: tuple[int, ...]

    @property
    def dst_dtype(self) -> str:
        return self.dtype if self.converts is None else self.converts

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def src_bytes(self) -> int:
        return self.numel * element_width(self.dtype)

    @property
    def dst_bytes(self) -> int:
        return self.numel * element_width(self.dst_dtype)

    @property
    def src_span(self) -> tuple[int, int]:
        """First source byte and the one after the last; between them may be bytes of others."""
        return _span(self.src_offset, self.size, self.src_stride, element_width(self.dtype))

    @property
    def dst_span(self) -> tuple[int, int]:
        """The same in the destination's storage."""
        return _span(self.dst_offset, self.size, self.dst_stride, element_width(self.dst_dtype))

    def within(self, window_bytes: int) -> Iterator[Piece]:
        """This piece cut into such whose `src_span` has at most `window_bytes` bytes, or those of one element."""
        start, stop = self.src_span
        if stop - start <= max(window_bytes, element_width(self.dtype)):
            yield self
            return
        dim = max((d for d in range(len(self.size)) if self.size[d] > 1), key=lambda d: self.src_stride[d])
        step_bytes = self.src_stride[dim] * element_width(self.dtype)
        inner = stop - start - (self.size[dim] - 1) * step_bytes
        count = max(1, (window_bytes - inner) // step_bytes + 1)
        for first in range(0, self.size[dim], count):
            yield from self._sliced(dim, first, min(count, self.size[dim] - first)).within(window_bytes)

    def _sliced(self, dim: int, first: int, count: int) -> Piece:
        return replace(
            self,
            size=(*self.size[:dim], count, *self.size[dim + 1 :]),
            src_offset=self.src_offset + first * self.src_stride[dim],
            dst_offset=self.dst_offset + first * self.dst_stride[dim],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One tensor's entry in the map. `dtype` and `shape` are the checkpoint's.

    `tensor_bytes` are all of the tensor, held here or not. `reason` says why a placement is opaque; `derives` names the
    module that computes something from a derived one. An opaque placement keeps the pieces that were seen, for the
    record: nothing may be written by them. `replica_of` names the tensor that the loader writes to the very same places
    afterwards: those bytes are patched once, as that tensor's, and a version has to give both the same bytes.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    kind: PlacementClass
    tensor_bytes: int
    reason: str | None = None
    derives: str | None = None
    replica_of: str | None = None

    @property
    def owned_bytes(self) -> int:
        """Bytes of the tensor that this rank holds, each as often as it holds it. Of an opaque one, all it has; of a
        replica, none.
        """
        if self.replica_of is not None:
            return 0
        if self.kind is PlacementClass.OPAQUE:
            return self.tensor_bytes
        return sum(piece.src_bytes for piece in self.pieces)

    @property
    def is_patched(self) -> bool:
        """True where a commit writes by the pieces."""
        return self.kind is not PlacementClass.OPAQUE and self.replica_of is None

    def demoted(self, reason: str) -> Placement:
        """The same tensor, opaque."""
        return replace(self, kind=PlacementClass.OPAQUE, reason=reason)


def _span(offset: int, size: tuple[int, ...], stride: tuple[int, ...], width: int) -> tuple[int, int]:
    if 0 in size:
        return offset * width, offset * width
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return offset * width, (last + 1) * width
