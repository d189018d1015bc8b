"""How a segment table becomes the programs of one launch. Pure numpy.

Every segment is cut into pieces of one unit: 16 bytes where source and destination allow 128-bit accesses, else 4,
else 1. All pieces of a unit are driven by one launch: a table of int64 rows, one per piece, and a map that gives
every program its piece.

    two pieces of 5 and 2 tiles: piece_of_program = [0 0 0 0 0 1 1], first_program = [0 5]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Ints
from gpusync_kernels.segments import Rows, limit_rows, merge_rows, split_rows

UNITS = (16, 4, 1)
TILE_UNITS = 1024
MAX_ROW_BYTES = 1 << 30  # positions inside a row stay below 2**31: they are divided in 32 bits
MAX_PROGRAMS = (1 << 31) - 1  # of a CUDA grid


@dataclass(frozen=True, slots=True)
class Launch:
    """`table` int64 [pieces, columns]; `piece_of_program` int32, one entry per program."""

    table: Ints
    piece_of_program: npt.NDArray[np.int32]

    @property
    def programs(self) -> int:
        return len(self.piece_of_program)


def map_programs(programs: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
    """`(first_program, piece_of_program)` when piece i needs `programs[i]` programs."""
    total = int(programs.sum())
    if total > MAX_PROGRAMS:
        raise ValueError(
            f"one launch would need {total} programs, expected at most {MAX_PROGRAMS}; bind fewer segments"
        )
    return np.cumsum(programs) - programs, np.repeat(np.arange(len(programs), dtype=np.int32), programs)


def tile_count(units: Ints, tile_units: int = TILE_UNITS) -> Ints:
    return -(-units // tile_units)


def address_rows(rows: Rows, *, dst: Ints | None = None, src: Ints | None = None) -> Rows:
    """Offsets replaced by addresses: `dst[i]` is where destination buffer i begins. A side left out keeps its
    offsets.
    """
    rows = rows.copy()
    if dst is not None:
        rows["dst_offset"] += dst[rows["dst"]]
    if src is not None:
        rows["src_offset"] += src[rows["src"]]
    return rows


def split_by_unit(rows: Rows) -> dict[int, Rows]:
    """Pieces of addressed segments by unit. Together they are the same bytes; every field of a piece is a multiple."""
    rows = merge_rows(rows)
    pieces = {}
    for unit in UNITS[:-1]:
        together = (rows["dst_offset"] - rows["src_offset"]) % unit == 0
        together &= (rows["rows"] == 1) | ((rows["dst_stride"] % unit == 0) & (rows["src_stride"] % unit == 0))
        head, pieces[unit], tail = split_rows(rows[together], unit)
        rows = np.concatenate([rows[~together], head, tail])
    pieces[UNITS[-1]] = rows
    return {unit: limit_rows(piece, MAX_ROW_BYTES) for unit, piece in pieces.items() if len(piece)}


def move_launch(rows: Rows, unit: int) -> Launch:
    """The launch over pieces of one unit.

    columns: dst address, src address, dst stride, src stride, units per row, units, first program, 1 if without gaps
    """
    row_units = rows["row_bytes"] // unit
    units = rows["rows"] * row_units
    first_program, piece_of_program = map_programs(tile_count(units))
    columns = (rows["dst_offset"], rows["src_offset"], rows["dst_stride"], rows["src_stride"], row_units, units)
    return Launch(np.stack([*columns, first_program, is_flat(rows)], axis=1), piece_of_program)


def is_flat(rows: Rows) -> Ints:
    """1 where the rows follow each other without a gap on both sides."""
    joined = (rows["dst_stride"] == rows["row_bytes"]) & (rows["src_stride"] == rows["row_bytes"])
    flat: Ints = ((rows["rows"] == 1) | joined).astype(np.int64)
    return flat
