"""Floats written by value where a loader converts the dtype, over a segment table, with the old destination bytes kept.

Numbers convert as torch does: exactly when widening, to the nearest, ties to even, when narrowing. A NaN stays a NaN
of its sign: widened with its payload, narrowed to the quiet one without (torch's own choice differs between its code
paths). Narrowing goes through float32: float16 to bfloat16 and back are exact steps up, then one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpusync_kernels.buffers import Buffer, Bytes, Ints, addresses_of, byte_view, device_of, nbytes_of, sizes_of
from gpusync_kernels.copy import copy_segments
from gpusync_kernels.moves import Moves, check_side, strided_view
from gpusync_kernels.placed import UNSIGNED
from gpusync_kernels.segments import Rows, SegmentTable, limit_rows, merge_rows
from gpusync_kernels.tiling import MAX_ROW_BYTES, Launch, map_programs, tile_count
from gpusync_kernels.word_order import Words


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """sign, `exponent_bits`, `mantissa_bits`. `finite`: all ones is NaN and the rest of that exponent are numbers."""

    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    @property
    def nbytes(self) -> int:
        return (1 + self.exponent_bits + self.mantissa_bits) // 8


FORMATS = {
    "F32": FloatFormat(8, 23),
    "BF16": FloatFormat(8, 7),
    "F16": FloatFormat(5, 10),
    "F8_E5M2": FloatFormat(5, 2),
    "F8_E4M3": FloatFormat(4, 3, finite=True),
}
TARGETS = ("F32", "BF16", "F16")


class BoundCasts:
    """Made by `bind_casts`."""

    def __init__(
        self,
        table: SegmentTable,
        *,
        dst: Sequence[Buffer],
        dst_dtypes: Sequence[str],
        src: Sequence[Buffer],
        src_dtypes: Sequence[str],
        old: Buffer | None,
    ) -> None:
        _check_dtypes(dst_dtypes, TARGETS)
        _check_dtypes(src_dtypes, FORMATS)
        self.table, self.dst, self.src, self.old = table, tuple(dst), tuple(src), old
        self.dst_dtypes, self.src_dtypes = tuple(dst_dtypes), tuple(src_dtypes)
        self.device = device_of([*self.dst, *self.src, *([] if old is None else [old])])
        check_side(table.rows, "dst", sizes_of(self.dst) // _widths(dst_dtypes))
        check_side(table.rows, "src", sizes_of(self.src) // _widths(src_dtypes))
        packed, self.old_bytes = self._destinations().packed()
        if old is not None and nbytes_of(old) < self.old_bytes:
            raise ValueError(f"old has {nbytes_of(old)} bytes, expected {self.old_bytes}")
        self.keep = None if old is None else Moves(packed.moves_from(self._destinations()), dst=[old], src=self.dst)
        self.restore = None if self.keep is None else Moves(self.keep.table.swapped(), dst=self.dst, src=[old])

    def _destinations(self) -> SegmentTable:
        """The destination's bytes, under a source that counts them through, so that they can be packed."""
        rows = merge_rows(self.table.rows)
        width = _widths(self.dst_dtypes)[rows["dst"]]
        for name in ("dst_offset", "dst_stride", "row_bytes"):
            rows[name] *= width
        rows["src"], rows["src_offset"], rows["src_stride"] = 0, 0, rows["row_bytes"]
        return SegmentTable(rows)

    def views(self) -> Iterator[tuple[str, str, Bytes, Bytes]]:
        """Per segment: source and destination dtype, destination bytes [rows, row bytes], source bytes the same way."""
        for to, to_offset, to_stride, at, at_offset, at_stride, rows, row in merge_rows(self.table.rows).tolist():
            src_dtype, dst_dtype = self.src_dtypes[at], self.dst_dtypes[to]
            wide, narrow = FORMATS[dst_dtype].nbytes, FORMATS[src_dtype].nbytes
            target = strided_view(byte_view(self.dst[to]), to_offset * wide, to_stride * wide, rows, row * wide)
            source = strided_view(byte_view(self.src[at]), at_offset * narrow, at_stride * narrow, rows, row * narrow)
            yield src_dtype, dst_dtype, target, source

    @cached_property
    def uploaded(self) -> list[tuple[int, int, Any, Any]]:
        """`(source width, destination width, table, programs' map)`, one per pair of widths."""
        from gpusync_kernels.device.launch import upload_launch

        rows = limit_rows(merge_rows(self.table.rows), MAX_ROW_BYTES)
        src_width, dst_width = _widths(self.src_dtypes)[rows["src"]], _widths(self.dst_dtypes)[rows["dst"]]
        launches = []
        for narrow, wide in sorted(set(zip(src_width.tolist(), dst_width.tolist(), strict=True))):
            some = rows[(src_width == narrow) & (dst_width == wide)]
            launches.append((narrow, wide, *upload_launch(self._launch(some, narrow, wide), self.device)))
        return launches

    def _launch(self, rows: Rows, src_width: int, dst_width: int) -> Launch:
        """columns: destination, its stride, source, its stride, elements per row, elements, first program, then of
        the source exponent bits, mantissa bits, 1 if finite, and of the destination mantissa bits
        """
        dst = addresses_of(self.dst)[rows["dst"]] + rows["dst_offset"] * dst_width
        src = addresses_of(self.src)[rows["src"]] + rows["src_offset"] * src_width
        if (dst % dst_width != 0).any() or (src % src_width != 0).any():
            raise ValueError("floats lie at an address that is no multiple of their size")
        total = rows["rows"] * rows["row_bytes"]
        first_program, piece_of_program = map_programs(tile_count(total))
        formats = [FORMATS[dtype] for dtype in self.src_dtypes]
        columns = (
            dst,
            rows["dst_stride"] * dst_width,
            src,
            rows["src_stride"] * src_width,
            rows["row_bytes"],
            total,
            first_program,
            *(
                np.array([int(getattr(each, name)) for each in formats], np.int64)[rows["src"]]
                for name in ("exponent_bits", "mantissa_bits", "finite")
            ),
            np.array([FORMATS[dtype].mantissa_bits for dtype in self.dst_dtypes], np.int64)[rows["dst"]],
        )
        return Launch(np.stack(columns, axis=1), piece_of_program)


def bind_casts(
    table: SegmentTable,
    *,
    dst: Sequence[Buffer],
    dst_dtypes: Sequence[str],
    src: Sequence[Buffer],
    src_dtypes: Sequence[str],
    old: Buffer | None = None,
) -> BoundCasts:
    """All numbers of `table` count elements, also row_bytes: each side has its own width. Dtypes are safetensors'
    names: sources of FORMATS, destinations of TARGETS. `old`, of at least `old_bytes`, receives the destination
    bytes.
    """
    return BoundCasts(table, dst=dst, dst_dtypes=dst_dtypes, src=src, src_dtypes=src_dtypes, old=old)


def cast_segments(bound: BoundCasts) -> None:
    """Destination elements become the source elements, converted. With `old`, their bytes are copied there first."""
    if bound.keep is not None:
        copy_segments(bound.keep)
    if bound.device is None:
        cast_reference(bound)
    else:
        from gpusync_kernels.device.cast import launch_cast

        launch_cast(bound)


def restore_cast(bound: BoundCasts) -> None:
    """Puts the destination bytes back that `cast_segments` kept."""
    if bound.restore is None:
        raise ValueError("casts were bound without a buffer for old bytes")
    copy_segments(bound.restore)


def cast_reference(bound: BoundCasts) -> None:
    for src_dtype, dst_dtype, target, source in bound.views():
        bits = widen(np.ascontiguousarray(source).view(UNSIGNED[FORMATS[src_dtype].nbytes]), FORMATS[src_dtype])
        words = bits if dst_dtype == "F32" else narrow(bits, FORMATS[dst_dtype])
        target[...] = words.view(np.uint8).reshape(target.shape)


def widen(words: Words, of: FloatFormat) -> Words:
    """Any format's bits -> float32 bits. F16 0x0001 (2**-24) -> 0x33800000; BF16 0x3F80 (1) -> 0x3F800000."""
    shift, bits = 23 - of.mantissa_bits, words.astype(np.uint32)
    magnitude = bits & np.uint32((1 << (of.exponent_bits + of.mantissa_bits)) - 1)
    sign = (bits ^ magnitude) << np.uint32(32 - 8 * of.nbytes)
    wide = magnitude << np.uint32(shift)
    if of.exponent_bits == 8:
        return sign | wide
    bias = (1 << (of.exponent_bits - 1)) - 1
    least = np.float32(2.0 ** (1 - bias - of.mantissa_bits))
    subnormal = magnitude < 1 << of.mantissa_bits
    top = (1 << (of.exponent_bits + of.mantissa_bits)) - (1 if of.finite else 1 << of.mantissa_bits)
    normal = wide + np.uint32((127 - bias) << 23)
    result = np.where(subnormal, (magnitude.astype(np.float32) * least).view(np.uint32), normal)
    return sign | np.where(magnitude >= top, wide | np.uint32(0x7F800000), result)


def narrow(bits: Words, to: FloatFormat) -> Words:
    """float32 bits -> BF16 or F16 bits. 0x3F808000 (1 + 2**-8), a tie -> BF16 0x3F80 (1)."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    sign = ((bits ^ magnitude) >> np.uint32(16)).astype(np.uint16)
    infinity = np.uint32(((1 << to.exponent_bits) - 1) << to.mantissa_bits)
    shift = np.uint32(23 - to.mantissa_bits)
    rebased = magnitude - np.uint32((128 - (1 << (to.exponent_bits - 1))) << 23)
    half = np.uint32((1 << (22 - to.mantissa_bits)) - 1)
    rounded = (rebased + half + ((rebased >> shift) & np.uint32(1))) >> shift
    if to.exponent_bits < 8:
        # adding 1/2 leaves a subnormal F16, a multiple of 2**-24, rounded to even in the last mantissa bits
        subnormal = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        rounded = np.where(magnitude < 0x38800000, subnormal, rounded)
        rounded = np.where(magnitude >= 0x47800000, infinity, np.minimum(rounded, infinity))
    quiet = infinity | np.uint32(1 << (to.mantissa_bits - 1))
    result: Words = sign | np.where(magnitude > 0x7F800000, quiet, rounded).astype(np.uint16)
    return result


def _widths(dtypes: Sequence[str]) -> Ints:
    return np.array([FORMATS[dtype].nbytes for dtype in dtypes], np.int64)


def _check_dtypes(dtypes: Sequence[str], known: Sequence[str] | dict[str, FloatFormat]) -> None:
    unknown = sorted(set(dtypes) - set(known))
    if unknown:
        raise ValueError(f"no cast for {unknown}, expected {sorted(known)}")
