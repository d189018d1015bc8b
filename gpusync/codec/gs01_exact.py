"""Plans the streams of few changes by what each would take to the byte, not by estimates. Pure numpy.

Of a tensor with a few hundred changes, descriptors and padding are a large share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.codec.gs01_packed import MAX_PACKED_CHANGES, packed_stream_bytes
from gpusync.codec.gs01_plan import LITERAL_CLASS, StreamPlan
from gpusync_kernels.gs01 import DESCRIPTOR
from gpusync_kernels.host_numpy import BLOCK_BITS, gaps_of

# Tensors with more changes are planned from their histogram.
EXACT_CHANGES = MAX_PACKED_CHANGES

_MAX_K = 16

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[Any]


def exact_streams(
    positions: Words, sizes: Words, classes: npt.NDArray[np.uint8], *, is_packed: bool
) -> list[StreamPlan]:
    """The smallest cut of the classes below literals into consecutive groups, of all there are, as GP01 or GS01."""
    present = [each for each in np.unique(classes).tolist() if each < LITERAL_CLASS]
    best: list[tuple[int, list[StreamPlan]]] = [(0, [])]
    for stop in range(1, len(present) + 1):
        tried = []
        for start in range(stop):
            plan = StreamPlan(first=present[start], stop=present[stop - 1] + 1, v=0)
            some = (classes >= plan.first) & (classes < plan.stop)
            largest = int(sizes[some].max()) - (1 << plan.first)
            nbytes, v = _stream_bytes(positions[some].astype(np.int64), largest, is_packed)
            tried.append(
                (best[start][0] + nbytes, [*best[start][1], StreamPlan(first=plan.first, stop=plan.stop, v=v)])
            )
        best.append(min(tried, key=lambda each: each[0]))
    return best[-1][1]


def choose_k(gaps: Ints, most: int, *, is_packed: bool) -> tuple[int, int]:
    """`(low bits, unary bits)`: the low bits of a gap that take the least room, near log2(0.69 x mean gap)."""
    middle = int(np.log2(max(1.0, 0.69 * float(gaps.mean()))))
    near = range(max(0, min(middle - 1, most, _MAX_K)), min(middle + 1, most, _MAX_K) + 1)
    tried = [(k, int((gaps >> k).sum()) + len(gaps)) for k in near]
    # in GS01 an index pair goes with every block of unary bits
    share = 1 if is_packed else (BLOCK_BITS + 64) / BLOCK_BITS
    return min(tried, key=lambda each: each[1] * share + len(gaps) * each[0])


def _stream_bytes(positions: Ints, largest: int, is_packed: bool) -> tuple[int, int]:
    """What a stream takes, and the bits of its steps."""
    v = 1 + largest.bit_length()
    k, bits = choose_k(gaps_of(positions), 32 - v, is_packed=is_packed)
    if is_packed:
        return packed_stream_bytes(count=len(positions), nbits=bits, width=k + v), v
    body = 8 * -(-bits // BLOCK_BITS) + 4 * -(-bits // 32) + 4 * -(-len(positions) * (k + v) // 32)
    return DESCRIPTOR.itemsize + -(-body // 8) * 8, v
