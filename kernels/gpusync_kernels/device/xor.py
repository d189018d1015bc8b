# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Exclusive-or on the device: `xor_reference` over tiles of 1,024 units of 16, 4 or 1 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from gpusync_kernels.device.launch import launch
from gpusync_kernels.device.tiles import flat_pointers, piece_of, row_pointers, rows_of
from gpusync_kernels.moves import Moves
from gpusync_kernels.tiling import TILE_UNITS


def launch_xor(moves: Moves) -> None:
    for unit, table, piece_of_program in moves.uploaded:
        launch(_xor_kernel, len(piece_of_program), table, piece_of_program, UNIT=unit, TILE=TILE_UNITS)


@triton.jit
def _xor_kernel(table, piece_of_program, UNIT: tl.constexpr, TILE: tl.constexpr):
    """dst[i] ^= src[i] for the units of one tile; `table` as `tiling.move_launch` lays it out.

    One row of 4 bytes, UNIT = 4: dst before = 1 2 3 4, src = 1 1 1 1, dst after = 0 3 2 5
    """
    piece = piece_of(table, piece_of_program, 8)
    dst = tl.load(piece)
    src = tl.load(piece + 1)
    units = tl.load(piece + 5)
    first = (tl.program_id(0) - tl.load(piece + 6)) * TILE
    if (tl.load(piece + 7) != 0) & (first + TILE <= units):
        words = flat_pointers(dst, first, UNIT, TILE)
        tl.store(words, tl.load(words) ^ tl.load(flat_pointers(src, first, UNIT, TILE)))
    else:
        row, unit = rows_of(first, tl.load(piece + 4), TILE)
        inside = (first + tl.arange(0, TILE) < units)[:, None]
        target = row_pointers(dst, tl.load(piece + 2), row, unit, UNIT)
        source = row_pointers(src, tl.load(piece + 3), row, unit, UNIT)
        tl.store(target, tl.load(target, mask=inside) ^ tl.load(source, mask=inside), mask=inside)
