"""What makes a GS01 blob with a sound head unsafe: a wrong index, a position outside, an element twice, stray bits.

A wrong index would make the block-parallel decoder differ from the sequential one, and two changes of one element
race on a device. Everything else that a damaged blob can do is to decode to other values, which the digest notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Bytes, Ints, byte_view, device_of
from gpusync_kernels.gs01 import END_BYTES, LITERAL, Blob
from gpusync_kernels.host import host_ops
from gpusync_kernels.sparse import Payload, check_payloads


def sparse_check(payloads: Sequence[Payload]) -> npt.NDArray[np.bool_]:
    """Per payload, whether it is safe. Needs one bit of scratch per element, of all payloads together."""
    check_payloads(payloads)
    if device_of([payload.data for payload in payloads]) is None:
        return np.array([sparse_check_reference(payload) for payload in payloads], np.bool_)
    from gpusync_kernels.device.sparse_check import launch_sparse_check

    return launch_sparse_check(payloads)


def sparse_check_reference(payload: Payload) -> bool:
    data, blob = byte_view(payload.data), payload.blob
    words, masks = zero_bits(blob)
    if (data[: blob.nbytes // 4 * 4].view("<u4")[words] & masks).any():
        return False
    seen, bases, spans = [], blob.base, blob.span
    for number in range(len(blob.streams)):
        positions = _checked_positions(data, blob, number, int(spans[number]))
        if positions is None:
            return False
        seen.append(positions + bases[number])
    return _all_different(seen)


def zero_bits(blob: Blob) -> tuple[Ints, npt.NDArray[np.uint32]]:
    """`(words, masks)`: the bits `masks` of the blob's u32 words number `words` must be zero. They follow the last
    unary bit, the last field, the last literal and the last stream.
    """
    streams, offsets = blob.streams, blob.offsets
    literal, index, unary, fields, end = offsets.T
    count = streams["count"].astype(np.int64)
    width = streams["k"].astype(np.int64) + streams["v"]
    words = np.where(streams["kind"] == LITERAL, count * blob.element_bytes, 0)
    ranges = [
        (8 * unary + streams["nbits"].astype(np.int64), 8 * fields),
        (8 * fields + count * width, 8 * end),
        (8 * (literal + words), 8 * index),
        (8 * end[-1:], 8 * (end[-1:] + END_BYTES)),
    ]
    start, stop = (np.concatenate(side) for side in zip(*ranges, strict=True))
    first = start // 32 + np.arange(3)[:, None]  # a range is shorter than 12 bytes: it lies in three words at most
    low, high = (np.clip(side - 32 * first, 0, 32) for side in (start, stop))
    masks = (((1 << high) - 1) & ~((1 << low) - 1)).astype(np.uint32)
    some = masks != 0
    return first[some], masks[some]


def _checked_positions(data: Bytes, blob: Blob, number: int, span: int) -> Any:
    """The stream's positions in its part, or None if one is outside or the index differs from what is decoded."""
    head = blob.streams[number]
    count, bits, k, v = (int(head[name]) for name in ("count", "nbits", "k", "v"))
    _, index_at, unary_at, fields_at, _ = blob.offsets[number].tolist()
    unary = data[unary_at:fields_at]
    fields = data[fields_at : fields_at + -(-count * (k + v) // 32) * 4]
    if int(np.bitwise_count(unary.view("<u4")).sum()) != count or not unary[(bits - 1) // 8] >> (bits - 1) % 8 & 1:
        return None
    positions, _, pairs = host_ops().decode_bits(unary, bits, fields, first=0, most=count, k=k, v=v, position=0)
    agrees = np.array_equal(data[index_at:unary_at].view("<u4").reshape(-1, 2), pairs[:-1])
    return positions if agrees and positions[-1] < span else None


def _all_different(ascending: list[Ints]) -> bool:
    """Whether no position is in two of the lists, of which each is ascending."""
    if len(ascending) == 1:
        return True
    merged = np.sort(np.concatenate(ascending))
    return not bool((merged[1:] == merged[:-1]).any())
