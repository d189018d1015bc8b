# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Float conversion on the device, in integer arithmetic: `cast_reference`, 1,024 elements a program."""

from __future__ import annotations

import triton
import triton.language as tl

from gpusync_kernels.cast import BoundCasts
from gpusync_kernels.device.launch import launch
from gpusync_kernels.device.tiles import piece_of, rows_of, words_at
from gpusync_kernels.tiling import TILE_UNITS


def launch_cast(bound: BoundCasts) -> None:
    for narrow, wide, table, pieces in bound.uploaded:
        launch(_cast_kernel, len(pieces), table, pieces, SOURCE=narrow, TARGET=wide, TILE=TILE_UNITS)


@triton.jit
def _cast_kernel(table, piece_of_program, SOURCE: tl.constexpr, TARGET: tl.constexpr, TILE: tl.constexpr):
    """dst[i] = src[i] by value, formats told by the piece's columns; `table`: `BoundCasts._launch`.

    SOURCE = 2, TARGET = 4, bfloat16 3F80 8000 (1, -0): float32 3F800000 80000000
    """
    piece = piece_of(table, piece_of_program, 11)
    first = (tl.program_id(0) - tl.load(piece + 6)) * TILE
    row, element = rows_of(first, tl.load(piece + 4), TILE)
    inside = first + tl.arange(0, TILE) < tl.load(piece + 5)
    source = words_at(tl.load(piece + 2) + row * tl.load(piece + 3) + element * SOURCE, SOURCE)
    bits = tl.load(source, mask=inside, other=0).to(tl.int32)
    exponent_bits = tl.load(piece + 7).to(tl.int32)
    if SOURCE < 4:
        mantissa_bits = tl.load(piece + 8).to(tl.int32)
        bits = _widen(bits, exponent_bits, mantissa_bits, tl.load(piece + 9).to(tl.int32), SOURCE)
    if TARGET < 4:
        bits = _narrow(bits, tl.load(piece + 10))
    target = words_at(tl.load(piece) + row * tl.load(piece + 1) + element * TARGET, TARGET)
    tl.store(target, bits.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _widen(bits, exponent_bits, mantissa_bits, finite, SOURCE: tl.constexpr):
    """`cast.widen`, on int32."""
    magnitude = bits & ((1 << (8 * SOURCE - 1)) - 1)
    sign = (bits >> 31) << 31
    wide = magnitude << (23 - mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    least = ((128 - bias - mantissa_bits) << 23).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32) * least).to(tl.int32, bitcast=True)
    result = tl.where(magnitude < (1 << mantissa_bits), subnormal, wide + ((127 - bias) << 23))
    top = (1 << (8 * SOURCE - 1)) - tl.where(finite != 0, 1, 1 << mantissa_bits)
    result = tl.where(magnitude >= top, wide | 0x7F800000, result)
    return sign | tl.where(exponent_bits == 8, wide, result)


@triton.jit
def _narrow(bits, mantissa_bits):
    """`cast.narrow`, on int32: to BF16 for 7 mantissa bits, else to F16."""
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 31) << 15
    brain = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    brain = tl.where(magnitude > 0x7F800000, 0x7FC0, brain)
    rebased = magnitude - 0x38000000
    half = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
    half = tl.where(magnitude < 0x38800000, subnormal, half)
    half = tl.where((magnitude >= 0x47800000) | (half > 0x7C00), 0x7C00, half)
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    return sign | tl.where(mantissa_bits == 7, brain, half)
