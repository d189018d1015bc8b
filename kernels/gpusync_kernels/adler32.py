"""adler32 from parts: what each byte contributes depends only on its value and its position, so any ownership adds up.

    a = 1 + sum d[i],  b = n + sum (n - i) d[i],  both mod 65521;  checksum = b << 16 | a

A partial is the pair of sums over the bytes that a table holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Buffer, Ints, addresses_of, byte_view, device_of, sizes_of
from gpusync_kernels.moves import check_side, strided_view
from gpusync_kernels.segments import Rows, SegmentTable, chunks_of, limit_rows, merge_rows, split_rows
from gpusync_kernels.tiling import MAX_ROW_BYTES, Launch, address_rows, is_flat, map_programs, tile_count

MODULUS = 65521
TILE_BYTES = 4096  # the weighted sum of a full tile fits 32 bits: 4096 * 4097 / 2 * 255 < 2**32
CHUNK_BYTES = 1 << 16


class BoundAdler32:
    """Made by `bind_adler32`."""

    def __init__(self, table: SegmentTable, nbytes: Ints, *, dst: Sequence[Buffer]) -> None:
        self.table, self.nbytes, self.dst = table, nbytes, tuple(dst)
        self.device = device_of(self.dst)
        check_side(table.rows, "dst", sizes_of(self.dst))
        check_side(table.rows, "src", nbytes)

    @cached_property
    def launches(self) -> list[tuple[int, Launch]]:
        """Pieces by the alignment of their loads: 16 for contiguous ones, 1 for the rest."""
        rows = merge_rows(address_rows(self.table.rows, dst=addresses_of(self.dst)))
        single = rows["rows"] == 1
        head, body, tail = split_rows(rows[single], 16)
        rest = limit_rows(np.concatenate([rows[~single], head, tail]), MAX_ROW_BYTES)
        pieces = ((16, limit_rows(body, MAX_ROW_BYTES)), (1, rest))
        return [(align, self._launch(piece)) for align, piece in pieces if len(piece)]

    def _launch(self, rows: Rows) -> Launch:
        """columns: address, stride, weight of the first byte, source stride, bytes per row, bytes, first program,
        tensor, 1 if without gaps
        """
        total = rows["rows"] * rows["row_bytes"]
        first_program, piece_of_program = map_programs(tile_count(total, TILE_BYTES))
        columns = (
            rows["dst_offset"],
            rows["dst_stride"],
            self.nbytes[rows["src"]] - rows["src_offset"],
            rows["src_stride"],
            rows["row_bytes"],
            total,
            first_program,
            rows["src"],
            is_flat(rows),
        )
        return Launch(np.stack(columns, axis=1), piece_of_program)

    @cached_property
    def uploaded(self) -> list[tuple[int, Any, Any]]:
        from gpusync_kernels.device.launch import upload_launch

        return [(align, *upload_launch(launch, self.device)) for align, launch in self.launches]


def bind_adler32(table: SegmentTable, nbytes: npt.ArrayLike, *, dst: Sequence[Buffer]) -> BoundAdler32:
    """The bytes in `dst` as parts of tensors of `nbytes` bytes: source t is tensor t, its offsets are in the tensor."""
    return BoundAdler32(table, np.atleast_1d(np.asarray(nbytes, np.int64)), dst=dst)


def adler32_partials(bound: BoundAdler32) -> Ints:
    """int64 [tensors, 2] on the host: both sums over the bytes held, below 65521. Partials of all owners are added."""
    if bound.device is None:
        return adler32_reference(bound)
    from gpusync_kernels.device.adler32 import launch_adler32

    return launch_adler32(bound)


def adler32_checksums(nbytes: npt.ArrayLike, partials: Ints) -> Ints:
    """The checksums of whole tensors from the sum of all partials, as `zlib.adler32` gives them."""
    low = (1 + partials[:, 0]) % MODULUS
    high = (np.asarray(nbytes, np.int64) + partials[:, 1]) % MODULUS
    checksums: Ints = high << 16 | low
    return checksums


def adler32_reference(bound: BoundAdler32) -> Ints:
    sums = np.zeros((len(bound.nbytes), 2), np.int64)
    buffers = [byte_view(buffer) for buffer in bound.dst]
    for segment in limit_rows(merge_rows(bound.table.rows), CHUNK_BYTES):
        for chunk in chunks_of(segment, CHUNK_BYTES):
            dst, offset, stride, tensor, position, step, rows, row_bytes = chunk.tolist()
            # float64 holds sums of 2**16 products below 2**24 exactly, and its matrix product is the fastest there is
            data = strided_view(buffers[dst], offset, stride, rows, row_bytes).astype(np.float64)
            plain = data.sum(axis=1).astype(np.int64)
            inner = (data @ np.arange(row_bytes, dtype=np.float64)).astype(np.int64)
            weight = (int(bound.nbytes[tensor]) - position - np.arange(rows) * step) % MODULUS
            sums[tensor] += plain.sum(), (weight * plain - inner).sum() % MODULUS
    return sums % MODULUS
