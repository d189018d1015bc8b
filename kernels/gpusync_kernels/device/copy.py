# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Copy on the device: `copy_reference` over tiles of 1,024 units of 16, 4 or 1 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from gpusync_kernels.device.launch import launch
from gpusync_kernels.device.tiles import flat_pointers, piece_of, row_pointers, rows_of
from gpusync_kernels.moves import Moves
from gpusync_kernels.tiling import TILE_UNITS


def launch_copy(moves: Moves) -> None:
    for unit, table, piece_of_program in moves.uploaded:
        launch(_copy_kernel, len(piece_of_program), table, piece_of_program, UNIT=unit, TILE=TILE_UNITS)


@triton.jit
def _copy_kernel(table, piece_of_program, UNIT: tl.constexpr, TILE: tl.constexpr):
    """dst[i] = src[i] for the units of one tile; `table` as `tiling.move_launch` lays it out.

    Two rows of 2 bytes, src stride 3, dst stride 2, UNIT = 1, TILE = 4:
    src = 1 2 9 3 4 9, dst before = 0 0 0 0, dst after = 1 2 3 4
    """
    piece = piece_of(table, piece_of_program, 8)
    dst = tl.load(piece)
    src = tl.load(piece + 1)
    units = tl.load(piece + 5)
    first = (tl.program_id(0) - tl.load(piece + 6)) * TILE
    if (tl.load(piece + 7) != 0) & (first + TILE <= units):
        tl.store(flat_pointers(dst, first, UNIT, TILE), tl.load(flat_pointers(src, first, UNIT, TILE)))
    else:
        row, unit = rows_of(first, tl.load(piece + 4), TILE)
        inside = (first + tl.arange(0, TILE) < units)[:, None]
        source = row_pointers(src, tl.load(piece + 3), row, unit, UNIT)
        target = row_pointers(dst, tl.load(piece + 2), row, unit, UNIT)
        tl.store(target, tl.load(source, mask=inside), mask=inside)
