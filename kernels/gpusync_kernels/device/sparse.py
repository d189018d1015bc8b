# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RET505  (in a kernel, branches on constants must be written out: what follows a return is still compiled)
"""GS01 blobs applied on the device: `sparse_reference`, one index block (1,024 unary bits) a program."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gpusync_kernels.buffers import address_of, addresses_of
from gpusync_kernels.device.gs01 import NUM_WARPS, decode_bits, read_pair, read_unary
from gpusync_kernels.device.launch import launch, upload_launch
from gpusync_kernels.device.tiles import piece_of, place, words_at
from gpusync_kernels.sparse import BoundSparse
from gpusync_kernels.sparse_items import sparse_launch

BLOB_ALIGN = 8


def upload_sparse(bound: BoundSparse, *, revert: bool) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """One launch per element width."""
    streams, segments = bound.streams[bound.stream_of], bound.segments[bound.segment_of]
    data = addresses_of([payload.data for payload in bound.payloads])[streams["payload"]]
    dst = addresses_of(bound.dst)[segments["dst"]] + segments["dst_offset"]
    if (data % BLOB_ALIGN != 0).any() or (dst % streams["element_bytes"] != 0).any():
        raise ValueError(
            f"a blob begins off a multiple of {BLOB_ALIGN}, or a destination off its element size; copy it"
        )
    undo = 0 if bound.undo is None else address_of(bound.undo)
    launches = []
    for width in np.unique(streams["element_bytes"]).tolist():
        some = streams["element_bytes"] == width
        made = sparse_launch(
            streams[some],
            segments[some],
            blocks=bound.blocks[some],
            data=data[some],
            dst=dst[some],
            undo=undo,
            revert=revert,
        )
        launches.append((width, *upload_launch(made, bound.device)))
    return launches


def launch_sparse(bound: BoundSparse, *, revert: bool) -> None:
    for width, table, pieces in bound.uploaded[revert]:
        launch(_sparse_kernel, len(pieces), table, pieces, num_warps=NUM_WARPS, ELEMENT=width)


@triton.jit
def _sparse_kernel(table, piece_of_program, ELEMENT: tl.constexpr):
    """The changes of one index block that a segment holds: step added or literal word written. `table`:
    `sparse_launch`.

    ELEMENT = 2, order 1, one change at element 3 with d = -2: dst[3] before = 0x0001 (M = 1), after = 0x8000 (M = -1)
    """
    piece = piece_of(table, piece_of_program, 21)
    block = tl.program_id(0) - tl.load(piece + 18) + tl.load(piece + 19)
    k = tl.load(piece + 14).to(tl.int32)
    v = tl.load(piece + 15).to(tl.int32)
    position, rank = read_pair(tl.load(piece + 6), block)
    bits, words = read_unary(tl.load(piece + 7), block, tl.load(piece + 11))
    change, local, running, value = decode_bits(bits, words, tl.load(piece + 8), rank, tl.load(piece + 12), k, v)
    position += running.to(tl.int64) - 1
    held, at = place(
        position + tl.load(piece + 2),
        tl.load(piece + 4),
        tl.load(piece + 5),
        tl.load(piece + 3),
        tl.load(piece + 1),
        ELEMENT,
        False,
    )
    held &= change & (position < tl.load(piece + 13))
    target = words_at(tl.load(piece) + at, ELEMENT)
    old = tl.load(target, mask=held, other=0)
    new = _add_step(old, value, tl.load(piece + 16), tl.load(piece + 17), tl.load(piece + 20), ELEMENT)
    literals = tl.load(piece + 9)
    record = tl.load(piece + 10)
    ordinal = (rank + local) * ELEMENT
    if literals != 0:
        new = tl.load(words_at(literals + ordinal, ELEMENT), mask=held, other=0)
    if record != 0:
        tl.store(words_at(record + ordinal, ELEMENT), old, mask=held)
    tl.store(target, new, mask=held)


@triton.jit
def _add_step(word, value, magnitude, order, sign, ELEMENT: tl.constexpr):
    """M(M(word) + sign * d) with d from its coded form: `sparse.step_of` and `word_order`."""
    if ELEMENT == 8:
        limit = order * 0x7FFFFFFFFFFFFFFF
        size = magnitude + (value >> 1).to(tl.int64)
        step = tl.where((value & 1) == 1, 0 - size, size) * sign
        signed = word ^ ((word >> 63) & limit)
        signed += step
        return signed ^ ((signed >> 63) & limit)
    else:
        limit = (order * ((1 << (8 * ELEMENT - 1)) - 1)).to(tl.int32)
        size = magnitude.to(tl.int32) + (value >> 1)
        step = tl.where((value & 1) == 1, 0 - size, size) * sign.to(tl.int32)
        signed = word.to(tl.int32)
        signed = signed ^ ((signed >> 31) & limit)
        signed = (signed + step).to(word.dtype).to(tl.int32)
        return (signed ^ ((signed >> 31) & limit)).to(word.dtype)
