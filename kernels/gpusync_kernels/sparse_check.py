"""What makes a GS01 blob unsafe to apply although its head is right: a wrong index, a position outside, an element
twice.

A wrong index would make the block-parallel decoder differ from the sequential one, and two changes of one element
race on a device. Everything else that a damaged blob can do is to decode to other values, which the digest notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Ints, byte_view, device_of
from gpusync_kernels.gs01 import BLOCK_BITS, Blob, decode_stream
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
    seen = []
    for number in range(len(blob.streams)):
        positions, _, _ = decode_stream(data, blob, number)
        if len(positions) != blob.streams["count"][number] or not _index_agrees(data, blob, number, positions):
            return False
        if positions[-1] >= blob.base[number] + blob.span[number]:
            return False
        seen.append(positions)
    everything = np.concatenate(seen)
    return len(np.unique(everything)) == len(everything)


def _index_agrees(data: Any, blob: Blob, number: int, positions: Ints) -> bool:
    """Every pair (position, rank) is what the bits before it add up to, and the last bit is a one."""
    k, nbits = int(blob.streams["k"][number]), int(blob.streams["nbits"][number])
    _, index_at, unary_at, fields_at, _ = blob.offsets[number].tolist()
    index = data[index_at:unary_at].view("<u4").reshape(-1, 2).astype(np.int64)
    bits = np.unpackbits(data[unary_at:fields_at], bitorder="little")
    if bits[nbits:].any() or bits[nbits - 1] != 1:
        return False
    ones = bits[:nbits].astype(np.int64)
    if ones.sum() != len(positions):
        return False
    gaps = np.diff(positions - blob.base[number], prepend=-1) - 1
    steps = np.full(nbits, 1 << k)
    steps[ones == 1] = (gaps & (1 << k) - 1) + 1
    starts = np.arange(len(index)) * BLOCK_BITS
    ranks, sums = (np.concatenate([[0], np.cumsum(each)])[starts] for each in (ones, steps))
    return bool(np.array_equal(index[:, 0], sums) and np.array_equal(index[:, 1], ranks))
