"""Plans streams of steps from histograms: which classes share a stream, and how many bytes that will take. Pure.

A class is the floor of log2 of a step's magnitude. Each stream pays for its positions and for a field as wide as its
largest step: few streams save positions, many save field bits. The cheapest cut into consecutive classes is found by
dynamic programming, for all parts of a tensor at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.gs01 import DESCRIPTOR, END_BYTES, HEAD

# Steps of 2**15 and more are stored as new words.
LITERAL_CLASS = 15
CLASSES = LITERAL_CLASS + 1

# A Rice-coded position takes about log2(gap) + 1.5 bits.
_POSITION_BITS = 1.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a form adds: bytes to a payload, bits to each of its streams, and what an index makes of a unary bit."""

    nbytes: int
    stream_bits: int
    unary_bit: float


# Beside its descriptor a stream has an index pair at least, and about 8 bytes of padding and unused bits.
BLOB = Overhead(nbytes=HEAD.size + END_BYTES, stream_bits=8 * (DESCRIPTOR.itemsize + 16), unary_bit=1 + 64 / 1024)
# A GP01 descriptor takes about 7 bytes, unused bits one.
PACKED = Overhead(nbytes=9, stream_bits=8 * 8, unary_bit=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Steps of classes [first, stop) as one stream with fields of `v` bits."""

    first: int
    stop: int
    v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlans:
    """`nbytes`: the estimate for the whole blob. `streams(part)`: its step streams, literals not among them."""

    nbytes: int
    _starts: npt.NDArray[np.int64]
    _counts: npt.NDArray[np.int64]

    def streams(self, part: int) -> list[StreamPlan]:
        found, stop = [], LITERAL_CLASS
        while stop > 0:
            first = int(self._starts[part, stop])
            if self._counts[part, stop] > self._counts[part, first]:
                found.append(StreamPlan(first=first, stop=stop, v=field_bits(first, stop)))
            stop = first
        return found[::-1]


def field_bits(first: int, stop: int) -> int:
    """The sign and magnitudes from 2**first to below 2**stop: 1 + ceil(log2(how many there are))."""
    return 1 + ((1 << stop) - (1 << first) - 1).bit_length()


_FIELD_BITS = np.array(
    [[field_bits(first, max(stop, first + 1)) for stop in range(CLASSES)] for first in range(CLASSES)]
)


def plan_streams(
    histogram: npt.NDArray[np.int64], spans: npt.NDArray[np.int64], *, element_bytes: int, overhead: Overhead
) -> PartPlans:
    """`histogram` [parts, CLASSES]: changes of each class; `spans` [parts]: elements of each part."""
    counts = np.zeros((len(histogram), CLASSES), np.int64)
    np.cumsum(histogram[:, :LITERAL_CLASS], axis=1, out=counts[:, 1:])
    costs = _bits(counts[:, None, :] - counts[:, :, None], spans[:, None, None], _FIELD_BITS, overhead)
    best = np.zeros((len(histogram), CLASSES))
    starts = np.zeros((len(histogram), CLASSES), np.int64)
    for stop in range(1, CLASSES):
        up_to = best[:, :stop] + costs[:, :stop, stop]
        starts[:, stop] = up_to.argmin(axis=1)
        best[:, stop] = up_to.min(axis=1)
    literals = _bits(histogram[:, LITERAL_CLASS], spans, np.array(8 * element_bytes), overhead)
    nbytes = overhead.nbytes + int((best[:, -1] + literals).sum() / 8)
    return PartPlans(nbytes=nbytes, _starts=starts, _counts=counts)


def _bits(
    changes: npt.NDArray[np.int64], span: npt.NDArray[np.int64], width: npt.NDArray[Any], overhead: Overhead
) -> Floats:
    """The bits of a stream; 0 without changes. In a dense one a gap is a bit for each element."""
    gap = span / np.maximum(changes, 1)
    position = np.minimum(gap * overhead.unary_bit, np.log2(gap) + _POSITION_BITS * overhead.unary_bit)
    bits: Floats = np.where(changes > 0, overhead.stream_bits + changes * (position + width), 0.0)
    return bits
