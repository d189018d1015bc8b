# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The check of GS01 blobs on the device: `sparse_check_reference`, one index block a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from gpusync_kernels.buffers import addresses_of, device_of
from gpusync_kernels.device.gs01 import NUM_WARPS, decode_bits, read_pair, read_unary
from gpusync_kernels.device.launch import launch, upload_launch, zeros
from gpusync_kernels.device.tiles import piece_of
from gpusync_kernels.gs01 import LITERAL, Blob
from gpusync_kernels.sparse import Payload, align_payloads
from gpusync_kernels.sparse_items import streams_of
from gpusync_kernels.tiling import Launch, map_programs


def launch_sparse_check(payloads: Sequence[Payload]) -> npt.NDArray[np.bool_]:
    device = device_of([payload.data for payload in payloads])
    payloads = align_payloads(payloads, device)
    bitmap_words = np.array([-(-payload.blob.elements // 32) for payload in payloads], np.int64)
    bitmaps = zeros((int(bitmap_words.sum()),), device, np.int32)
    faults = zeros((len(payloads),), device, np.int32)
    made = _launch(payloads, np.cumsum(bitmap_words) - bitmap_words)
    table, pieces = upload_launch(made, device)
    launch(_sparse_check_kernel, made.programs, table, pieces, bitmaps, faults, num_warps=NUM_WARPS)
    return np.asarray(faults.cpu().numpy() == 0)


def _launch(payloads: Sequence[Payload], bitmap: npt.NDArray[np.int64]) -> Launch:
    """columns: index, unary, fields, blocks, bits, count, elements of the part, k, v, first element of the part,
    first word of the bitmap, payload, first program, end of the zeros behind the fields, end of the literal words
    """
    streams = streams_of([(payload.source, payload.blob) for payload in payloads])
    data = addresses_of([payload.data for payload in payloads])[streams["payload"]]
    first_program, piece_of_program = map_programs(streams["blocks"])
    words = np.where(streams["kind"] == LITERAL, streams["count"] * streams["element_bytes"], 0)
    columns = (
        *(data + streams[name] for name in ("index_at", "unary_at", "fields_at")),
        *(streams[name] for name in ("blocks", "nbits", "count", "span", "k", "v", "base")),
        bitmap[streams["payload"]],
        streams["payload"],
        first_program,
        data + np.concatenate([_zeros_end(payload.blob) for payload in payloads]),
        data + streams["literal_at"] + words,
    )
    return Launch(np.stack(columns, axis=1), piece_of_program)


def _zeros_end(blob: Blob) -> npt.NDArray[np.int64]:
    """Per stream, where the zeros behind its fields end; behind those of the last one the blob ends."""
    ends = blob.offsets[:, 4].copy()
    ends[-1] = blob.nbytes
    return ends


@triton.jit
def stray_bits(fields, used, fields_end, literals_end, index):
    """How many words behind the last field, and bytes behind the last literal word, are not zero: 20 bytes at most."""
    lane = tl.arange(0, 32)
    at = fields + (used >> 5) * 4 + lane.to(tl.int64) * 4
    word = tl.load(at.to(tl.pointer_type(tl.uint32)), mask=at < fields_end, other=0)
    word = word >> tl.where(lane == 0, used & 31, 0).to(tl.uint32)
    at = literals_end + lane.to(tl.int64)
    byte = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=at < index, other=0)
    return tl.sum((word != 0).to(tl.int32) + (byte != 0).to(tl.int32), 0)


@triton.jit
def _sparse_check_kernel(table, piece_of_program, bitmaps, faults):
    """faults[payload] += what is wrong with one index block. `table` as `_launch` lays it out.

    Two streams that both change element 5: the second to come finds bit 5 of the bitmap set, faults = 1
    """
    piece = piece_of(table, piece_of_program, 15)
    block = tl.program_id(0) - tl.load(piece + 12)
    index = tl.load(piece)
    nbits = tl.load(piece + 4)
    count = tl.load(piece + 5)
    k = tl.load(piece + 7).to(tl.int32)
    v = tl.load(piece + 8).to(tl.int32)
    position, rank = read_pair(index, block)
    bits, words = read_unary(tl.load(piece + 1), block, nbits)
    change, _, running, _ = decode_bits(bits, words, tl.load(piece + 2), rank, count, k, v)
    number = block * 1024 + tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    ones = rank + tl.sum(tl.sum(bits, 1), 0)
    wrong = ((bits == 1) & (number >= nbits)).to(tl.int32)
    wrong += ((bits == 0) & (number == nbits - 1)).to(tl.int32)
    if block + 1 < tl.load(piece + 3):
        next_position, next_rank = read_pair(index, block + 1)
        reached = position + tl.max(tl.max(running, 1), 0)
        wrong += ((number == block * 1024) & ((next_rank != ones) | (next_position != reached))).to(tl.int32)
    else:
        stray = stray_bits(tl.load(piece + 2), count * (k + v), tl.load(piece + 13), tl.load(piece + 14), index)
        wrong += ((number == block * 1024) & ((ones != count) | (stray != 0))).to(tl.int32)
    if block == 0:
        wrong += ((number == 0) & ((position != 0) | (rank != 0))).to(tl.int32)
    at = position + running.to(tl.int64) - 1
    inside = at < tl.load(piece + 6)
    wrong += (change & (at >= tl.load(piece + 6))).to(tl.int32)
    element = tl.load(piece + 9) + at
    bit = (element & 31).to(tl.int32)
    seen = tl.atomic_or(bitmaps + tl.load(piece + 10) + (element >> 5), 1 << bit, mask=change & inside, sem="relaxed")
    wrong += tl.where(change & inside, (seen >> bit) & 1, 0)
    tl.atomic_add(faults + tl.load(piece + 11), tl.sum(tl.sum(wrong, 1), 0), sem="relaxed")
