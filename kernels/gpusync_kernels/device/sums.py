# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Block sums on the device: `block_sums_reference`, 32 blocks a program; fused with the xor over whole blocks."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from gpusync_kernels.device.launch import launch, upload
from gpusync_kernels.device.tiles import piece_of, rows_of
from gpusync_kernels.device.xor import launch_xor
from gpusync_kernels.sums import BoundSums
from gpusync_kernels.sums_pieces import ITEMS
from gpusync_kernels.xxh3 import STRIPE_KEYS


def launch_block_sums(bound: BoundSums, sums: torch.Tensor) -> None:
    _launch_blocks(bound, sums, xor=False)
    _launch_words(bound.word_tables, sums)


def launch_xor_block_sums(bound: BoundSums, sums: torch.Tensor) -> None:
    _launch_blocks(bound, sums, xor=True)
    launch_xor(bound.unfused)
    _launch_words(bound.word_tables, sums)


def launch_cut_words(bound: BoundSums, sums: torch.Tensor) -> None:
    _launch_words(bound.cut_tables, sums)


def _launch_blocks(bound: BoundSums, sums: torch.Tensor, *, xor: bool) -> None:
    table, pieces = bound.block_tables
    keys = _keys(sums.device)
    launch(_block_sums_kernel, len(pieces), table, pieces, keys, sums, XOR=xor, BLOCKS=ITEMS)


def _launch_words(tables: list[tuple[bool, torch.Tensor, torch.Tensor]], sums: torch.Tensor) -> None:
    for by_bytes, table, pieces in tables:
        launch(_word_sums_kernel, len(pieces), table, pieces, _keys(sums.device), sums, BY_BYTES=by_bytes, BLOCKS=ITEMS)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return upload(STRIPE_KEYS.view("int64"), device)


@triton.jit
def _block_sums_kernel(table, piece_of_program, keys, sums, XOR: tl.constexpr, BLOCKS: tl.constexpr):
    """sums[block, lane] of whole blocks; with XOR, first words ^= payload. `table` as `block_launch` lays it out.

    One block of zeros: lane i is the sum over stripes s of lo32(k) * hi32(k), k = STRIPE_KEYS[s, i]; the same block
    with one word w at stripe 0, lane 2 has lane 2 changed by lo32(w ^ k) * hi32(w ^ k) - lo32(k) * hi32(k), and lane
    3 by w.
    """
    piece = piece_of(table, piece_of_program, 10)
    address = tl.load(piece)
    payload = tl.load(piece + 2)
    sums_row = tl.load(piece + 4)
    blocks = tl.load(piece + 7)
    first = (tl.program_id(0) - tl.load(piece + 8)) * BLOCKS
    lane = tl.arange(0, 8)[None, :]
    if (tl.load(piece + 9) != 0) & (first + BLOCKS <= blocks):
        step = tl.arange(0, BLOCKS)[:, None] * 128 + lane
        words = tl.multiple_of((address + first * 1024).to(tl.pointer_type(tl.int64)), 16) + step
        others = tl.multiple_of((payload + first * 1024).to(tl.pointer_type(tl.int64)), 16) + step
        result = _sum_stripes(words, others, keys, None, XOR, False, BLOCKS)
        tl.store(sums + (sums_row + first) * 8 + tl.arange(0, BLOCKS)[:, None] * 8 + lane, result)
    else:
        row, block = rows_of(first, tl.load(piece + 6), BLOCKS)
        inside = (first + tl.arange(0, BLOCKS) < blocks)[:, None]
        start = (address + row * tl.load(piece + 1) + block * 1024).to(tl.pointer_type(tl.int64))
        other = (payload + row * tl.load(piece + 3) + block * 1024).to(tl.pointer_type(tl.int64))
        words = tl.multiple_of(start, 16)[:, None] + lane
        others = tl.multiple_of(other, 16)[:, None] + lane
        result = _sum_stripes(words, others, keys, inside, XOR, True, BLOCKS)
        out = sums_row + row * tl.load(piece + 5) + block
        tl.store(sums + out[:, None] * 8 + lane, result, mask=inside)


@triton.jit
def _word_sums_kernel(table, piece_of_program, keys, sums, BY_BYTES: tl.constexpr, BLOCKS: tl.constexpr):
    """sums[block, lane] += what the words of a piece contribute. `table` as `word_launches` lays it out.

    With BY_BYTES a word is put together from its bytes, zeros where the row has none, and counts if it has one. A row
    of 3 bytes, 1 2 3, at position 14 of a tensor: word 1 is 0x0201 << 48 (lane 1, its value to lane 0), word 2 is 3.
    """
    piece = piece_of(table, piece_of_program, 9)
    row_bytes = tl.load(piece + 4)
    items = tl.load(piece + 6)
    first = (tl.program_id(0) - tl.load(piece + 7)) * BLOCKS
    row, touched = rows_of(first, tl.load(piece + 5), BLOCKS)
    start = tl.load(piece + 2) + row * tl.load(piece + 3)
    block = (start >> 10) + touched
    address = tl.load(piece) + row * tl.load(piece + 1)
    column = (block << 10) - start
    here = (first + tl.arange(0, BLOCKS) < items) & (column < row_bytes)
    lane = tl.arange(0, 8)
    products = tl.zeros((BLOCKS, 8), tl.uint64)
    total = tl.zeros((BLOCKS, 8), tl.uint64)
    for stripe in tl.range(16):
        at = column[:, None] + (stripe * 64 + lane * 8)[None, :]
        if BY_BYTES:
            inside = here[:, None] & (at > -8) & (at < row_bytes)
            word = tl.zeros((BLOCKS, 8), tl.uint64)
            for byte in tl.static_range(8):
                some = inside & (at + byte >= 0) & (at + byte < row_bytes)
                value = tl.load((address[:, None] + at + byte).to(tl.pointer_type(tl.uint8)), mask=some, other=0)
                word |= value.to(tl.uint64) << (8 * byte)
        else:
            inside = here[:, None] & (at >= 0) & (at < row_bytes)
            value = tl.load((address[:, None] + at).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            word = value.to(tl.uint64, bitcast=True)
        key = word ^ tl.load(keys + stripe * 8 + lane).to(tl.uint64, bitcast=True)[None, :]
        products += tl.where(inside, (key & 0xFFFFFFFF) * (key >> 32), 0)
        total += word
    result = (products + _swap_lanes(total, BLOCKS)).to(tl.int64, bitcast=True)
    out = sums + ((tl.load(piece + 8) + block) * 8)[:, None] + lane[None, :]
    tl.atomic_add(out, result, mask=here[:, None] & (lane >= 0)[None, :], sem="relaxed")


@triton.jit
def _sum_stripes(words, others, keys, inside, XOR: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr):
    """[BLOCKS, 8] sums over the 16 stripes; `words` and `others` point at lane 0..7 of stripe 0 of each block."""
    products = tl.zeros((BLOCKS, 8), tl.uint64)
    total = tl.zeros((BLOCKS, 8), tl.uint64)
    for stripe in tl.range(16):
        if MASKED:
            value = tl.load(words + stripe * 8, mask=inside, other=0)
        else:
            value = tl.load(words + stripe * 8)
        if XOR:
            if MASKED:
                value ^= tl.load(others + stripe * 8, mask=inside, other=0)
                tl.store(words + stripe * 8, value, mask=inside)
            else:
                value ^= tl.load(others + stripe * 8)
                tl.store(words + stripe * 8, value)
        word = value.to(tl.uint64, bitcast=True)
        key = word ^ tl.load(keys + stripe * 8 + tl.arange(0, 8)).to(tl.uint64, bitcast=True)[None, :]
        products += (key & 0xFFFFFFFF) * (key >> 32)
        total += word
    return (products + _swap_lanes(total, BLOCKS)).to(tl.int64, bitcast=True)


@triton.jit
def _swap_lanes(lanes, BLOCKS: tl.constexpr):
    """Neighbouring lanes exchanged: 0 1 2 3 4 5 6 7 -> 1 0 3 2 5 4 7 6."""
    even, odd = tl.split(tl.reshape(lanes, (BLOCKS, 4, 2)))
    return tl.reshape(tl.join(odd, even), (BLOCKS, 8))
