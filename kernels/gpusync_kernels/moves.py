"""Segments bound to the buffers on both sides: what `copy` and `xor` run on. Bind once, launch often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gpusync_kernels.buffers import Buffer, Bytes, Ints, addresses_of, byte_view, device_of, sizes_of
from gpusync_kernels.segments import Rows, SegmentTable, merge_rows, row_extent
from gpusync_kernels.tiling import Launch, address_rows, move_launch, split_by_unit


class Moves:
    """Made by `bind_moves`. Holds the buffers; `device` is None when they lie in host memory."""

    def __init__(self, table: SegmentTable, *, dst: Sequence[Buffer], src: Sequence[Buffer]) -> None:
        self.table = table
        self.dst, self.src = tuple(dst), tuple(src)
        self.device = device_of((*self.dst, *self.src))
        check_side(table.rows, "dst", sizes_of(self.dst))
        check_side(table.rows, "src", sizes_of(self.src))

    def views(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Per segment, views [rows, row_bytes] of its destination and its source; one row where all rows touch."""
        dst, src = [byte_view(buffer) for buffer in self.dst], [byte_view(buffer) for buffer in self.src]
        for to, to_offset, to_stride, at, at_offset, at_stride, rows, row_bytes in merge_rows(self.table.rows).tolist():
            yield (
                strided_view(dst[to], to_offset, to_stride, rows, row_bytes),
                strided_view(src[at], at_offset, at_stride, rows, row_bytes),
            )

    @cached_property
    def launches(self) -> list[tuple[int, Launch]]:
        """One launch per unit that occurs, at most three."""
        rows = address_rows(self.table.rows, dst=addresses_of(self.dst), src=addresses_of(self.src))
        return [(unit, move_launch(piece, unit)) for unit, piece in split_by_unit(rows).items()]

    @cached_property
    def uploaded(self) -> list[tuple[int, Any, Any]]:
        """`launches` with their tables on the device."""
        from gpusync_kernels.device.launch import upload

        return [
            (unit, upload(launch.table, self.device), upload(launch.piece_of_program, self.device))
            for unit, launch in self.launches
        ]


def bind_moves(table: SegmentTable, *, dst: Sequence[Buffer], src: Sequence[Buffer]) -> Moves:
    """`table` between these buffers. Raises ValueError when a segment leaves its buffer, naming it."""
    return Moves(table, dst=dst, src=src)


def strided_view(buffer: Bytes, offset: int, stride: int, rows: int, row_bytes: int) -> Bytes:
    """`rows` rows of `row_bytes` bytes, `stride` apart, as a view."""
    if rows == 1:
        return buffer[offset : offset + row_bytes].reshape(1, -1)
    return np.ndarray((rows, row_bytes), np.uint8, buffer=buffer, offset=offset, strides=(stride, 1))


def check_side(rows: Rows, side: str, sizes: Ints) -> None:
    """Every segment names a buffer that exists and stays inside it."""
    missing = rows[side] >= len(sizes)
    if missing.any():
        segment = int(np.argmax(missing))
        raise ValueError(f"segment {segment} names {side} {rows[side][segment]}, found {len(sizes)}")
    outside = row_extent(rows, side) > sizes[rows[side]]
    if outside.any():
        segment = int(np.argmax(outside))
        raise ValueError(
            f"segment {segment} ends at byte {row_extent(rows, side)[segment]} of {side} {rows[side][segment]}, "
            f"which has {sizes[rows[side][segment]]}"
        )
