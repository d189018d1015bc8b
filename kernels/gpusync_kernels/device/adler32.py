# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""adler32 partials on the device: `adler32_reference` over tiles of 4,096 bytes."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from gpusync_kernels.adler32 import MODULUS, TILE_BYTES, BoundAdler32
from gpusync_kernels.buffers import Ints
from gpusync_kernels.device.launch import launch, zeros
from gpusync_kernels.device.tiles import piece_of, rows_of


def launch_adler32(bound: BoundAdler32) -> Ints:
    sums = zeros((len(bound.nbytes), 2), bound.device)
    for align, table, pieces in bound.uploaded:
        launch(_adler32_kernel, len(pieces), table, pieces, sums, ALIGN=align, TILE=TILE_BYTES)
    return np.asarray(sums.cpu().numpy() % MODULUS, np.int64)


@triton.jit
def _adler32_kernel(table, piece_of_program, sums, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """sums[tensor] += (sum d, sum w d mod 65521) over one tile, w = tensor's size - position. `table` as `_launch`
    lays it out in `BoundAdler32`.

    Bytes 1 2 3 at positions 4..6 of a tensor of 10: weights 6 5 4, sums += (6, 28)
    """
    piece = piece_of(table, piece_of_program, 9)
    address = tl.load(piece)
    weight = tl.load(piece + 2)
    total = tl.load(piece + 5)
    first = (tl.program_id(0) - tl.load(piece + 6)) * TILE
    if (tl.load(piece + 8) != 0) & (first + TILE <= total):
        start = tl.multiple_of((address + first).to(tl.pointer_type(tl.uint8)), ALIGN)
        data = tl.load(start + tl.arange(0, TILE)).to(tl.uint32)
        plain = tl.sum(data, 0).to(tl.int64)
        inner = tl.sum((TILE - tl.arange(0, TILE)).to(tl.uint32) * data, 0).to(tl.int64)
        weighted = inner + (weight - first - TILE) % 65521 * plain
    else:
        row, byte = rows_of(first, tl.load(piece + 4), TILE)
        inside = first + tl.arange(0, TILE) < total
        at = address + row * tl.load(piece + 1) + byte
        value = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.int64)
        weights = (weight - row * tl.load(piece + 3) - byte).to(tl.uint64) % 65521
        plain = tl.sum(value, 0)
        weighted = tl.sum(tl.where(inside, weights.to(tl.int64) * value, 0), 0)
    out = sums + tl.load(piece + 7) * 2
    tl.atomic_add(out, plain, sem="relaxed")
    tl.atomic_add(out + 1, weighted % 65521, sem="relaxed")
