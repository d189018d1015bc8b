# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, unreachable"
"""All checks of a GS01 blob's streams in one compiled loop. It says yes or no; what is wrong, `gpusync.codec` finds."""

from __future__ import annotations

import numpy as np
from numba import int64, uint8, uint32, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from gpusync_kernels.buffers import Bytes
from gpusync_kernels.gs01 import LITERAL, Blob
from gpusync_kernels.host_numba import compiled


def are_sound(data: Bytes, blob: Blob) -> bool:
    """Whether every bit of a blob's streams is as the layout demands, and no element changes twice.

    `data` are the blob's bytes. Takes a bit of memory for each element of the largest part.
    """
    by_part = blob.streams["part"].argsort(kind="stable")
    marks = np.zeros((int(blob.span.max()) + 7) >> 3, np.uint8)
    words = data[: data.size & ~3].view("<u4")
    return bool(_are_sound(data, words, blob.streams, by_part, blob.span, blob.offsets, blob.element_bytes, marks))


@compiled
def _are_zeros(data, start, stop):
    found = uint8(0)
    for place in range(start, stop):
        found |= data[place]
    return found == 0


@compiled
def _are_sound(data, words, streams, by_part, spans, offsets, element_bytes, marks):
    part = int64(-1)
    for number in by_part:
        head, span = streams[number], spans[number]
        literals_at, index_at, unary_at, fields_at, end = offsets[number]
        count, nbits = int64(head.count), int64(head.nbits)
        if int64(head.part) != part:
            part = int64(head.part)
            marks[: (span + 7) >> 3] = 0
        k, width = uint64(head.k), uint64(head.k) + uint64(head.v)
        low = (uint64(1) << k) - uint64(1)
        index, unary, fields = index_at >> 2, unary_at >> 2, fields_at >> 2
        position, rank, at = int64(0), int64(0), uint64(0)
        for place in range((nbits + 31) >> 5):
            if place & 31 == 0:
                pair = index + 2 * (place >> 5)
                if int64(words[pair]) != position or int64(words[pair + 1]) != rank:
                    return False
            word, left = words[unary + place], min(nbits - 32 * place, 32)
            passed = int64(0)
            while word != 0:
                bit = int64(trailing_zeros(word))
                word &= word - uint32(1)
                if bit >= left or rank == count:
                    return False
                field = uint64(0)
                if width != 0:
                    here = fields + int64(at >> uint64(5))
                    field = (uint64(words[here]) | (uint64(words[here + 1]) << uint64(32))) >> (at & uint64(31))
                    at += width
                position += ((bit - passed) << int64(k)) + int64(field & low) + 1
                passed = bit + 1
                rank += 1
                if position > span:
                    return False
                byte, flag = (position - 1) >> 3, uint8(1 << ((position - 1) & 7))
                if marks[byte] & flag:
                    return False
                marks[byte] |= flag
            if 32 * (place + 1) >= nbits and passed != left:  # the last bit is a one
                return False
            position += (left - passed) << int64(k)
        used = count * int64(width)
        last = fields_at + (used >> 3)
        if rank != count or (last < end and data[last] >> (used & 7) != 0):
            return False
        if head.kind == LITERAL:
            literals_at += count * element_bytes
        if not _are_zeros(data, last + 1, end) or not _are_zeros(data, literals_at, index_at):
            return False
    return True
