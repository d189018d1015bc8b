# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RET505  (in a kernel, branches on constants must be written out: what follows a return is still compiled)
"""What the kernels share: how a program finds its piece, and the pointers of a tile of units.

A unit is what one lane moves: 16, 4 or 1 bytes. A tile is TILE units. Where a piece has no gaps and the tile is full,
pointers are plain consecutive addresses and nothing is masked; otherwise each unit finds its row by a division, and
whole units are masked, so that a 16-byte unit stays one 128-bit access on both paths.
"""

import triton
import triton.language as tl


@triton.jit
def piece_of(table, piece_of_program, COLUMNS: tl.constexpr):
    """Where the row of this program's piece begins."""
    return table + tl.load(piece_of_program + tl.program_id(0)).to(tl.int64) * COLUMNS


@triton.jit
def rows_of(first, row_units, TILE: tl.constexpr):
    """`(row, unit within the row)` of the TILE units from `first` on, int64. row_units + TILE must be below 2**32.

    first = 7, row_units = 3, TILE = 4: rows 2 2 3 3, units 1 2 0 1
    """
    row = first // row_units
    column = (first - row * row_units).to(tl.uint32) + tl.arange(0, TILE).to(tl.uint32)
    width = row_units.to(tl.uint32)
    step = column // width
    return row + step.to(tl.int64), (column - step * width).to(tl.int64)


@triton.jit
def flat_pointers(address, first, UNIT: tl.constexpr, TILE: tl.constexpr):
    """The elements of TILE consecutive units from unit `first` on."""
    if UNIT == 1:
        return (address + first).to(tl.pointer_type(tl.int8)) + tl.arange(0, TILE)
    else:
        start = tl.multiple_of((address + first * UNIT).to(tl.pointer_type(tl.int32)), UNIT)
        return start + tl.arange(0, TILE * UNIT // 4)


@triton.jit
def row_pointers(address, stride, row, unit, UNIT: tl.constexpr):
    """The elements of each unit, [TILE, elements of a unit]."""
    if UNIT == 1:
        return (address + row * stride + unit).to(tl.pointer_type(tl.int8))[:, None]
    else:
        start = tl.multiple_of((address + row * stride + unit * UNIT).to(tl.pointer_type(tl.int32)), UNIT)
        return start[:, None] + tl.arange(0, UNIT // 4)[None, :]


@triton.jit
def place(offset, rows, row_elements, src_stride, dst_stride, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """`(held, byte offset)` of elements `offset` after a segment's first one: `placed.locate`. Where not held, no
    offset.

    Without WIDE, offsets are below 2**32 and divided in 32 bits.

    Two rows of 2 of 6 columns, packed, 1 byte each: offsets 0 1 2 6 7 8 lie at 0 1 - 2 3 -
    """
    held = offset >= 0
    if rows == 1:
        held &= offset < row_elements
        at = offset * ELEMENT
    else:
        if WIDE:
            row = tl.where(held, offset, 0) // src_stride
        else:
            row = (offset.to(tl.uint32) // src_stride.to(tl.uint32)).to(tl.int64)
        column = offset - row * src_stride
        held &= (column < row_elements) & (row < rows)
        at = row * dst_stride + column * ELEMENT
    return held, at


@triton.jit
def words_at(address, ELEMENT: tl.constexpr):
    """Addresses as pointers to signed words of ELEMENT bytes."""
    if ELEMENT == 1:
        return address.to(tl.pointer_type(tl.int8))
    elif ELEMENT == 2:
        return address.to(tl.pointer_type(tl.int16))
    elif ELEMENT == 4:
        return address.to(tl.pointer_type(tl.int32))
    else:
        return address.to(tl.pointer_type(tl.int64))


@triton.jit
def aligned_words_at(address, ELEMENT: tl.constexpr, ALIGN: tl.constexpr):
    """`words_at` for a vector of multiples of ALIGN. The hint is lost unless it stands on the conversion itself."""
    if ELEMENT == 1:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int8)), ALIGN)
    elif ELEMENT == 2:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), ALIGN)
    elif ELEMENT == 4:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGN)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), ALIGN)
