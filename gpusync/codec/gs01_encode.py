"""Encodes steps, as GP01 or GS01: one look at both states finds them and what they will take, a second writes streams.

The layouts are drawn in `gpusync.codec.gs01_packed` and `gpusync_kernels.gs01`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.codec.gs01_exact import EXACT_CHANGES, choose_k, exact_streams
from gpusync.codec.gs01_packed import MAX_PACKED_CHANGES, EncodedStream, StreamHead, pack
from gpusync.codec.gs01_plan import BLOB, CLASSES, LITERAL_CLASS, PACKED, PartPlans, StreamPlan, plan_streams
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import total_bytes
from gpusync.errors import NOWHERE, LayoutError, Where
from gpusync_kernels.gs01 import END_BYTES, HEAD, LITERAL, MAGIC
from gpusync_kernels.host import host_ops
from gpusync_kernels.host_numpy import gaps_of

# Tensors are looked at in pieces of this many elements; a part of a blob is 16, 4 or 1 of them: small parts follow
# changes that cluster, large ones have fewer streams.
PIECE_LOG2 = 20
PART_LOG2 = (24, 22, 20)
# Where more than this share of a piece changes, it is looked at in short stretches.
_MANY = 1 / 16
_STRETCH_LOG2 = 16
_FEW = 1 << 12
# Steps that have been found are kept up to this size, and found again above it.
KEEP_BYTES = 64 << 20
# Not even those of one piece, if they are more than this share of it.
_KEEP_SHARE = 0.5
_DENSE = 0.05
_CLASS_OF = np.zeros((1 << LITERAL_CLASS) + 1, np.uint8)
for _class in range(CLASSES):
    _CLASS_OF[1 << _class : 2 << _class] = _class

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Changes of a stretch: ascending positions in it; sizes (unsigned), signs and classes of steps; literal words."""

    positions: npt.NDArray[Any]
    sizes: Words
    negative: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.uint8]
    literals: Words

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.positions, self.sizes, self.negative, self.classes, self.literals))


class Gs01Steps:
    """The difference of two states of a tensor, ready to be encoded.

    `changed`: how many elements differ. `nbytes`: about what the payload will take: GP01 where changes are few (and
    `packs`), else GS01. `old` and `new` are arrays or sources and must not change before `encode` has returned. Holds
    at most KEEP_BYTES and a few pieces.
    """

    def __init__(
        self,
        old: U8 | Payload,
        new: U8 | Payload,
        *,
        element_bytes: int,
        float_order: bool,
        packs: bool = True,
        where: Where = NOWHERE,
    ) -> None:
        nbytes = total_bytes(new, nbytes=total_bytes(old, nbytes=None), where=where)
        if element_bytes not in (1, 2, 4, 8) or nbytes % element_bytes:
            raise LayoutError(
                "tensor does not hold whole elements", where=where, expected=f"a multiple of {element_bytes}",
                found=nbytes,
            )  # fmt: skip
        self._old, self._new = old, new
        self._element_bytes, self._order = element_bytes, int(float_order)
        self._elements = nbytes // element_bytes
        self._kept: dict[int, _Steps] = {}
        self._packs = packs
        self._plan()

    @property
    def changed(self) -> int:
        return int(self._histogram.sum())

    @property
    def nbytes(self) -> int:
        return self._plans.nbytes

    def encode(self) -> bytes:
        """The payload. There must be a change."""
        write = pack if self._is_packed else write_blob
        return write(
            list(self._streams()), element_bytes=self._element_bytes, order=self._order, part_log2=self._part_log2,
            elements=self._elements,
        )  # fmt: skip

    @property
    def _is_packed(self) -> bool:
        return self._packs and self.changed <= MAX_PACKED_CHANGES

    def _streams(self) -> Iterator[EncodedStream]:
        is_exact, is_packed = self.changed <= EXACT_CHANGES, self._is_packed
        for part in range(len(self._spans)):
            steps = self._part(part)
            if not len(steps.positions):
                continue
            if is_exact:
                plans = exact_streams(steps.positions, steps.sizes, steps.classes, is_packed=is_packed)
            else:
                plans = self._plans.streams(part)
            for plan in [*plans, None]:
                stream = _encode_stream(steps, plan, part, is_packed)
                if stream is not None:
                    yield stream

    def _plan(self) -> None:
        """Looks at every piece, and takes the part size that promises the smaller payload."""
        pieces = -(-self._elements >> PIECE_LOG2)
        self._histogram = np.zeros((pieces, CLASSES), np.int64)
        kept = 0
        for piece in range(pieces):
            steps = self._find_few(piece)
            if steps is None:
                self._histogram[piece] = sum(_count_classes(each.classes) for each in self._find_many(piece))
                continue
            self._histogram[piece] = _count_classes(steps.classes)
            if steps.nbytes <= _KEEP_SHARE * (self._element_bytes << PIECE_LOG2) and kept + steps.nbytes <= KEEP_BYTES:
                self._kept[piece] = steps
                kept += steps.nbytes
        overhead = PACKED if self._is_packed else BLOB
        best: tuple[int, Ints, PartPlans] | None = None
        for log2 in PART_LOG2:
            if self._elements <= 1 << log2 - 1 and log2 != PART_LOG2[-1]:
                continue  # smaller parts are as good
            spans = np.minimum(self._elements - (np.arange(-(-self._elements >> log2)) << log2), 1 << log2)
            starts = np.arange(0, pieces, 1 << log2 - PIECE_LOG2)
            histogram = np.add.reduceat(self._histogram, starts) if pieces else self._histogram
            plans = plan_streams(histogram, spans, element_bytes=self._element_bytes, overhead=overhead)
            # Smaller parts cost next to nothing where changes are dense, and hold the memory down.
            is_dense = self.changed > _DENSE * self._elements
            if best is None or is_dense or plans.nbytes < best[2].nbytes:
                best = log2, spans, plans
        if best is not None:
            self._part_log2, self._spans, self._plans = best

    def _part(self, part: int) -> _Steps:
        """The steps of a part, found again where they were not kept; what was kept of it is let go."""
        pieces = range(part << self._part_log2 - PIECE_LOG2, part + 1 << self._part_log2 - PIECE_LOG2)
        found = [
            (piece, self._kept.pop(piece) if piece in self._kept else self._find(piece))
            for piece in pieces
            if piece < len(self._histogram) and self._histogram[piece].any()
        ]
        if len(found) == 1 and found[0][0] == pieces[0]:
            return found[0][1]
        return self._join([(piece - pieces[0] << PIECE_LOG2, steps) for piece, steps in found])

    def _join(self, found: list[tuple[int, _Steps]]) -> _Steps:
        """Stretches in one, each with where its positions count from."""
        each = [self._nothing(), *(steps for _, steps in found)]
        positions = [steps.positions + np.uint32(start) for start, steps in [(0, each[0]), *found]]
        return _Steps(
            positions=np.concatenate(positions),
            sizes=np.concatenate([steps.sizes for steps in each]),
            negative=np.concatenate([steps.negative for steps in each]),
            classes=np.concatenate([steps.classes for steps in each]),
            literals=np.concatenate([steps.literals for steps in each]),
        )

    def _find(self, piece: int) -> _Steps:
        steps = self._find_few(piece)
        if steps is None:
            steps = self._join([(at << _STRETCH_LOG2, each) for at, each in enumerate(self._find_many(piece))])
        return steps

    def _find_few(self, piece: int) -> _Steps | None:
        """None where changes are many."""
        return self._look(piece << PIECE_LOG2, 1 << PIECE_LOG2, _MANY)

    def _find_many(self, piece: int) -> Iterator[_Steps]:
        start = piece << PIECE_LOG2
        for at in range(start, min(start + (1 << PIECE_LOG2), self._elements), 1 << _STRETCH_LOG2):
            yield self._look(at, 1 << _STRETCH_LOG2, 1) or self._nothing()

    def _look(self, start: int, count: int, share: float) -> _Steps | None:
        """The steps of elements [start, start + count); None if more than this share of them change."""
        count = min(count, self._elements - start)
        old, new = (
            _stretch(side, start * self._element_bytes, count * self._element_bytes) for side in (self._old, self._new)
        )
        most = max(_FEW, int(share * count))
        found = host_ops().find_steps(old, new, element_bytes=self._element_bytes, order=self._order, most=most)
        if found is None:
            return None
        positions, steps = found
        if not len(positions):
            return self._nothing()
        sizes = np.abs(steps).view(f"<u{self._element_bytes}")  # of the least integer, too, as an unsigned one
        classes = _CLASS_OF[np.minimum(sizes, 1 << LITERAL_CLASS) if self._element_bytes > 2 else sizes]
        literals = new.view(f"<u{self._element_bytes}")[positions[classes == LITERAL_CLASS]]
        return _Steps(positions=positions, sizes=sizes, negative=steps < 0, classes=classes, literals=literals)

    def _nothing(self) -> _Steps:
        none = np.empty(0, f"<u{self._element_bytes}")
        return _Steps(
            positions=np.empty(0, "<u4"), sizes=none, negative=np.empty(0, np.bool_), classes=np.empty(0, np.uint8),
            literals=none,
        )  # fmt: skip


def encode_gs01(
    old: U8 | Payload, new: U8 | Payload, *, element_bytes: int, float_order: bool, where: Where = NOWHERE
) -> bytes | None:
    """The GS01 blob that turns `old` into `new`, or None if they are equal. Exact for all bit patterns."""
    steps = Gs01Steps(old, new, element_bytes=element_bytes, float_order=float_order, packs=False, where=where)
    return steps.encode() if steps.changed else None


def write_blob(
    streams: Sequence[EncodedStream], *, element_bytes: int, order: int, part_log2: int, elements: int
) -> bytes:
    """The GS01 blob of these streams."""
    head = HEAD.pack(MAGIC, element_bytes, order, part_log2, 0, elements, len(streams), 0)
    bodies = (piece for stream in streams for piece in _body(stream))
    return b"".join((head, *(stream.head.to_bytes() for stream in streams), *bodies, bytes(END_BYTES)))


def _encode_stream(steps: _Steps, plan: StreamPlan | None, part: int, is_packed: bool) -> EncodedStream | None:
    """A stream of steps; the literal stream without a plan. None if it would be empty."""
    if plan is None:
        some = np.flatnonzero(steps.classes == LITERAL_CLASS)
        first, v, kind = 0, 0, LITERAL
        values = np.zeros(len(some), np.uint32)
    else:
        some = np.flatnonzero((steps.classes >= plan.first) & (steps.classes < plan.stop))
        first, kind = plan.first, 0
        values = (steps.sizes[some].astype(np.uint32) - np.uint32(1 << first)) << np.uint32(1)
        values |= steps.negative[some]
        v = max(1, int(values.max(initial=0)).bit_length())
    if not len(some):
        return None
    positions = steps.positions[some].astype(np.int64)
    k = choose_k(gaps_of(positions), 32 - v, is_packed=is_packed)[0]
    bits, index, unary, fields = host_ops().pack_changes(positions, values, k=k, v=v)
    return EncodedStream(
        head=StreamHead(count=len(some), nbits=bits, part=part, g=first, k=k, v=v, kind=kind),
        literals=steps.literals if kind == LITERAL else steps.literals[:0],
        index=index,
        unary=unary,
        fields=fields,
    )


def _count_classes(classes: npt.NDArray[np.uint8]) -> Ints:
    """Stretch by stretch: each is widened to eight bytes a class."""
    counts = np.zeros(CLASSES, np.int64)
    for start in range(0, len(classes), 1 << 16):
        counts += np.bincount(classes[start : start + (1 << 16)], minlength=CLASSES)
    return counts


def _body(stream: EncodedStream) -> Iterator[Words | bytes]:
    yield stream.literals
    yield bytes(-stream.literals.nbytes % 8)
    arrays = (stream.index, stream.unary, stream.fields)
    yield from arrays
    yield bytes(-sum(array.nbytes for array in arrays) % 8)


def _stretch(data: U8 | Payload, start: int, nbytes: int) -> U8:
    if isinstance(data, np.ndarray):
        return data.reshape(-1)[start : start + nbytes]
    read = np.empty(nbytes, np.uint8)
    data.read_into(start, as_bytes(read))
    return read
