"""Byte planes to elements and back, over a segment table: the raw bytes of GF01's step planes and full planes.

Plane p holds bits 8p .. 8p + 7 of every element of the whole tensor; planes follow each other, least significant
first. Full planes hold the words themselves. Step planes hold, zig-zag coded, the steps of `word_order` between an
old tensor and the new one; as a step is added, applying step planes twice is wrong, and they are undone by the same
planes.

    2-byte words 0x0102 0x0304: full planes 02 04 01 03
    order 0, old 5 5, new 6 3: steps 1 -2, zig-zag 2 3: step planes 02 03 00 00
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpusync_kernels.buffers import Buffer, Bytes, Ints, addresses_of, byte_view, device_of, nbytes_of, sizes_of
from gpusync_kernels.moves import check_side, strided_view, tiles_of
from gpusync_kernels.placed import UNSIGNED, element_rows
from gpusync_kernels.segments import Rows, SegmentTable, limit_rows, merge_rows, split_rows
from gpusync_kernels.tiling import MAX_ROW_BYTES, Launch, map_programs, tile_count
from gpusync_kernels.word_order import Words, from_order, to_order, unzigzag, zigzag

VECTOR = 16  # elements that one lane moves where everything is aligned for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """The raw bytes of one source's planes: `element_bytes` planes of one byte per element of the whole tensor."""

    data: Buffer
    element_bytes: int
    order: int = 0

    @property
    def elements(self) -> int:
        return nbytes_of(self.data) // self.element_bytes


class BoundPlanes:
    """Made by `bind_planes`."""

    def __init__(
        self, table: SegmentTable, *, dst: Sequence[Buffer], planes: Sequence[Planes], old: Sequence[Buffer]
    ) -> None:
        self.dst, self.planes, self.old = tuple(dst), tuple(planes), tuple(old)
        self.device = device_of([*self.dst, *self.old, *(each.data for each in self.planes)])
        check_side(table.rows, "dst", sizes_of(self.dst))
        check_side(table.rows, "src", sizes_of([each.data for each in self.planes]))
        if self.old and not np.array_equal(sizes_of(self.old), sizes_of(self.dst)):
            raise ValueError("old buffers differ in size from the destinations")
        self.table = table
        self.element_bytes = np.array([each.element_bytes for each in self.planes], np.int64)

    def views(self) -> Iterator[tuple[Planes, Bytes, list[Bytes], Bytes | None]]:
        """Per segment: its planes, its bytes [rows, row bytes], each plane [rows, elements], the old words' bytes."""
        for segment in element_rows(merge_rows(self.table.rows), self.element_bytes).tolist():
            to, to_offset, to_stride, source, first, stride, rows, elements = segment
            planes = self.planes[source]
            size, data = planes.element_bytes, byte_view(planes.data)
            each = [strided_view(data, p * planes.elements + first, stride, rows, elements) for p in range(size)]
            place = (to_offset, to_stride, rows, elements * size)
            old = strided_view(byte_view(self.old[to]), *place) if self.old else None
            yield planes, strided_view(byte_view(self.dst[to]), *place), each, old

    def upload(self) -> None:
        """Puts the tables on the device now, so that operations have nothing left to do but launch."""
        if self.device is not None:
            _ = self.uploaded

    @cached_property
    def uploaded(self) -> list[tuple[int, int, Any, Any]]:
        """`(element width, elements per lane, table, programs' map)`, at most two per width."""
        from gpusync_kernels.device.launch import upload_launch

        rows = merge_rows(self.table.rows)
        launches = []
        for width in np.unique(self.element_bytes[rows["src"]]).tolist():
            for unit, piece in self._split(rows[self.element_bytes[rows["src"]] == width], width):
                launches.append((width, unit, *upload_launch(self._launch(piece, width, unit), self.device)))
        return launches

    def _split(self, rows: Rows, width: int) -> list[tuple[int, Rows]]:
        """Pieces of which a lane can move 16 elements, and the rest."""
        modulus = VECTOR * width
        first = -rows["src_offset"] % modulus
        together = self._data()[rows["src"]] % VECTOR == 0
        together &= self._elements()[rows["src"]] % VECTOR == 0
        for base in (self._base(self.dst), self._base(self.old)):
            together &= (base[rows["dst"]] + rows["dst_offset"] + first) % VECTOR == 0
        together &= (rows["rows"] == 1) | ((rows["src_stride"] % modulus == 0) & (rows["dst_stride"] % VECTOR == 0))
        head, body, tail = split_rows(rows[together], modulus, "src")
        pieces = ((VECTOR, body), (1, np.concatenate([rows[~together], head, tail])))
        return [(unit, limit_rows(piece, MAX_ROW_BYTES)) for unit, piece in pieces if len(piece)]

    def _launch(self, rows: Rows, width: int, unit: int) -> Launch:
        """columns: destination, its stride, old words, first plane, bytes per plane, first element, source stride,
        units per row, units, first program, order
        """
        rows = element_rows(rows, width)
        dst, old = (self._base(side)[rows["dst"]] + rows["dst_offset"] for side in (self.dst, self.old))
        if ((dst % width != 0) | (old % width != 0)).any():
            raise ValueError(f"elements of {width} bytes lie at an address that is no multiple of it")
        row_units = rows["row_bytes"] // unit
        units = rows["rows"] * row_units
        first_program, piece_of_program = map_programs(tile_count(units, tile_elements(width, unit) // unit))
        columns = (
            dst,
            rows["dst_stride"],
            old,
            self._data()[rows["src"]],
            self._elements()[rows["src"]],
            rows["src_offset"],
            rows["src_stride"],
            row_units,
            units,
            first_program,
            np.array([planes.order for planes in self.planes], np.int64)[rows["src"]],
        )
        return Launch(np.stack(columns, axis=1), piece_of_program)

    def _data(self) -> Ints:
        return addresses_of([planes.data for planes in self.planes])

    def _elements(self) -> Ints:
        return np.array([planes.elements for planes in self.planes], np.int64)

    def _base(self, side: Sequence[Buffer]) -> Ints:
        """Where the buffers of a side begin; without old buffers, 0, which is aligned for anything."""
        return addresses_of(side) if side else np.zeros(len(self.dst), np.int64)


def tile_elements(element_bytes: int, unit: int) -> int:
    """How many elements a program works on: 16 per lane where they move together, 8 where registers run out."""
    return 2048 if unit == VECTOR and element_bytes < 8 else 1024


def bind_planes(
    table: SegmentTable, *, dst: Sequence[Buffer], planes: Sequence[Planes], old: Sequence[Buffer] = ()
) -> BoundPlanes:
    """`planes[t]` belongs to source t of the table, whose offsets are bytes of that tensor. `old`, for
    `read_step_planes`, holds the words before the change, laid out as `dst`.
    """
    return BoundPlanes(table, dst=dst, planes=planes, old=old)


def write_full_planes(bound: BoundPlanes) -> None:
    """Destination words become what the planes hold. Idempotent."""
    _write(bound, "full")


def apply_step_planes(bound: BoundPlanes) -> None:
    """Adds the planes' steps to the destination words."""
    _write(bound, "apply")


def revert_step_planes(bound: BoundPlanes) -> None:
    """Undoes exactly one `apply_step_planes`."""
    _write(bound, "revert")


def read_full_planes(bound: BoundPlanes) -> None:
    """Fills the planes from the destination words, where segments hold them."""
    _read(bound, "full")


def read_step_planes(bound: BoundPlanes) -> None:
    """Fills the planes with the steps from `old` to the destination words, where segments hold them."""
    if not bound.old:
        raise ValueError("no old words were bound")
    _read(bound, "steps")


def _write(bound: BoundPlanes, mode: str) -> None:
    if bound.device is None:
        write_planes_reference(bound, mode)
    else:
        from gpusync_kernels.device.planes import launch_write_planes

        launch_write_planes(bound, mode)


def _read(bound: BoundPlanes, mode: str) -> None:
    if bound.device is None:
        read_planes_reference(bound, mode)
    else:
        from gpusync_kernels.device.planes import launch_read_planes

        launch_read_planes(bound, mode)


def write_planes_reference(bound: BoundPlanes, mode: str) -> None:
    for planes, target, each, _ in bound.views():
        for rows, columns in tiles_of(*each[0].shape):
            part = target[rows, _bytes(columns, planes)]
            words = np.stack([plane[rows, columns] for plane in each], axis=-1)
            words = words.view(UNSIGNED[planes.element_bytes])[..., 0]
            if mode != "full":
                words = _stepped(_words(part, planes), words, planes.order, mode)
            part[...] = np.ascontiguousarray(words).view(np.uint8)


def read_planes_reference(bound: BoundPlanes, mode: str) -> None:
    for planes, target, each, old in bound.views():
        for rows, columns in tiles_of(*each[0].shape):
            words = _words(target[rows, _bytes(columns, planes)], planes)
            if mode == "steps" and old is not None:
                before = _words(old[rows, _bytes(columns, planes)], planes)
                words = zigzag(to_order(words, planes.order) - to_order(before, planes.order))
            split = words.view(np.uint8).reshape(*words.shape, planes.element_bytes)
            for number, plane in enumerate(each):
                plane[rows, columns] = split[..., number]


def _bytes(columns: slice, planes: Planes) -> slice:
    return slice(columns.start * planes.element_bytes, columns.stop * planes.element_bytes)


def _stepped(words: Words, coded: Words, order: int, mode: str) -> Words:
    steps, old = unzigzag(coded), to_order(words, order)
    return from_order(old - steps if mode == "revert" else old + steps, order)


def _words(data: Bytes, planes: Planes) -> Words:
    """Rows of bytes as rows of words, a copy where they are not contiguous."""
    return np.ascontiguousarray(data).view(UNSIGNED[planes.element_bytes])
