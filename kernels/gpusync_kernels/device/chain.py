# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The XXH3 chain on the device: one program of one warp per tensor, eight lanes of it at work.

The step is serial, about 20 cycles; the next 16 rows of sums are loaded while 16 are worked on.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from gpusync_kernels.chain import Links
from gpusync_kernels.device.launch import launch, upload, zeros
from gpusync_kernels.xxh3 import HIGH_KEY, LANES, LAST_STRIPE_KEY, LOW_KEY, SCRAMBLE_KEY, SumsLayout


def launch_advance(layout: SumsLayout, sums: torch.Tensor, links: Links) -> npt.NDArray[np.uint64]:
    return _launch(layout, sums, zeros((0,), sums.device), links, finish=False)


def launch_digests(layout: SumsLayout, sums: torch.Tensor, tails: torch.Tensor, links: Links) -> npt.NDArray[np.uint64]:
    return _launch(layout, sums, tails, links, finish=True)


def _launch(
    layout: SumsLayout, sums: torch.Tensor, tails: torch.Tensor, links: Links, *, finish: bool
) -> npt.NDArray[np.uint64]:
    """`table`: first row of sums, steps, size of the tensor."""
    columns = (layout.first_row + links.first_block, links.stop_block - links.first_block, layout.nbytes)
    table = upload(np.stack(columns, axis=1), sums.device)
    start = upload(links.lanes.view(np.int64), sums.device)
    out = zeros((len(layout), 2 if finish else LANES), sums.device)
    keys = _keys(sums.device)
    launch(_chain_kernel, len(layout), table, start, sums, tails, keys, out, num_warps=1, FINISH=finish)
    result: npt.NDArray[np.uint64] = out.cpu().numpy().view(np.uint64)
    return result


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return upload(np.stack([SCRAMBLE_KEY, LAST_STRIPE_KEY, LOW_KEY, HIGH_KEY]).view(np.int64), device)


@triton.jit
def _chain_kernel(table, start, sums, tails, keys, out, FINISH: tl.constexpr):
    """acc = scramble(acc + sums) over whole blocks; with FINISH, then the digest (low, high), else the accumulator.

    `sums` has 16 rows more than are used: they are loaded ahead. One step of one lane: acc = 1, sums = 2, key = 0:
    (3 ^ (3 >> 47) ^ 0) * 0x9E3779B1 = 0x1DAA66D13.
    """
    tensor = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    row = sums + tl.load(table + tensor * 3) * 8 + lane
    steps = tl.load(table + tensor * 3 + 1)
    key = tl.load(keys + lane).to(tl.uint64, bitcast=True)
    acc = tl.load(start + tensor * 8 + lane).to(tl.uint64, bitcast=True)
    ahead = _load_rows(row)
    after = _load_rows(row + 64)
    for _ in range(0, steps // 16):
        row += 128
        for i in tl.static_range(8):
            acc = _step(acc, ahead[i], key)
        ahead = _load_rows(row)
        for i in tl.static_range(8):
            acc = _step(acc, after[i], key)
        after = _load_rows(row + 64)
    for _ in range(0, steps % 16):
        acc = _step(acc, tl.load(row), key)
        row += 8
    if FINISH:
        size = tl.load(table + tensor * 3 + 2).to(tl.uint64)
        acc += tl.load(row).to(tl.uint64, bitcast=True) + _last_stripe(tails + tensor * 64, keys + 8)
        low = _merge(acc, keys + 16, size * 0x9E3779B185EBCA87)
        high = _merge(acc, keys + 24, 0xFFFFFFFFFFFFFFFF ^ (size * 0xC2B2AE3D27D4EB4F))
        tl.store(out + tensor * 2, low.to(tl.int64, bitcast=True))
        tl.store(out + tensor * 2 + 1, high.to(tl.int64, bitcast=True))
    else:
        tl.store(out + tensor * 8 + lane, acc.to(tl.int64, bitcast=True))


@triton.jit
def _load_rows(row):
    return (
        tl.load(row),
        tl.load(row + 8),
        tl.load(row + 16),
        tl.load(row + 24),
        tl.load(row + 32),
        tl.load(row + 40),
        tl.load(row + 48),
        tl.load(row + 56),
    )


@triton.jit
def _step(acc, row, key):
    acc += row.to(tl.uint64, bitcast=True)
    return (acc ^ (acc >> 47) ^ key) * 0x9E3779B1


@triton.jit
def _last_stripe(tail, keys):
    """What the last 64 bytes contribute to each lane."""
    lane = tl.arange(0, 8)
    words = tail.to(tl.pointer_type(tl.int64))
    word = tl.load(words + lane).to(tl.uint64, bitcast=True)
    other = tl.load(words + (lane ^ 1)).to(tl.uint64, bitcast=True)
    key = word ^ tl.load(keys + lane).to(tl.uint64, bitcast=True)
    return (key & 0xFFFFFFFF) * (key >> 32) + other


@triton.jit
def _merge(acc, keys, start):
    """Four 128-bit products of neighbouring lanes, folded and added, then mixed into one half of the digest."""
    mixed = acc ^ tl.load(keys + tl.arange(0, 8)).to(tl.uint64, bitcast=True)
    even, odd = tl.split(tl.reshape(mixed, (4, 2)))
    value = start + tl.sum((even * odd) ^ tl.umulhi(even, odd), 0)
    value ^= value >> 37
    value *= 0x165667919E3779F9
    return value ^ (value >> 32)
