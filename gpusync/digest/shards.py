"""What one rank holds of tensors that nobody may hold whole: its pieces, checked."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.digest.algorithms import new_digest
from gpusync.digest.intervals import Ints, by_position, overlaps, singles_of, span_stops
from gpusync.digest.supply import Buffers, Source, Supply
from gpusync.errors import NOWHERE, LayoutError, Where
from gpusync_kernels.buffers import Buffer, byte_view, device_of, nbytes_of, sizes_of
from gpusync_kernels.segments import Rows, SegmentTable, merge_rows, row_extent

Pieces = Sequence[tuple[int, Buffer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """One tensor of `nbytes` bytes, and this rank's `pieces` of it: `(byte offset in the tensor, buffer)`.

    Buffers are contiguous numpy arrays or torch tensors of any dtype, on the CPU or on one CUDA device. A rank may hold
    nothing, and it may hold a byte twice; then both are compared. `name` is for errors.
    """

    name: str
    algorithm: str
    nbytes: int
    pieces: Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The same for many tensors as one segment table: destination = `buffers`, source t = tensor t as published.

    Nothing is copied: the buffers have to stay, and stay unchanged, until the digests are made. Instead of them a
    `supply` makes the bytes when they are asked for; then only it knows what the destination side means.
    Raises `UnsupportedFormatError` for an unknown algorithm; `LayoutError` where a segment leaves its tensor or buffer,
    and where buffers are not contiguous or do not lie together.
    """

    names: tuple[str, ...]
    algorithms: tuple[str, ...]
    nbytes: Ints
    table: SegmentTable
    buffers: tuple[Buffer, ...] = ()
    supply: Supply | None = None

    def __post_init__(self) -> None:
        for algorithm in set(self.algorithms):
            new_digest(algorithm, where=Where(tensor=self.names[self.algorithms.index(algorithm)]))
        if len(self.nbytes) != len(self.names) or (self.nbytes < 0).any():
            raise LayoutError("tensors have no sizes", expected=f"{len(self.names)}, none negative", found=self.nbytes)
        object.__setattr__(self, "buffers", _bytes_of(self.buffers))
        rows = self.table.rows
        self._check_side("src", rows, self.nbytes, "tensors")
        if self.supply is None:
            self._check_side("dst", rows, sizes_of(self.buffers), "buffers")
        elif self.buffers:
            raise LayoutError("shards have buffers and a supply", expected="one", found=f"{len(self.buffers)} buffers")

    @classmethod
    def of(cls, tensors: Sequence[ShardedTensor]) -> Shards:
        """One segment per piece. Raises as the class does."""
        columns: list[tuple[int, int, int]] = []
        buffers: list[Buffer] = []
        for number, tensor in enumerate(tensors):
            size = _size_of(tensor)
            for offset, buffer in tensor.pieces:
                where = Where(tensor=tensor.name)
                nbytes, start = nbytes_of(buffer), operator.index(offset)
                if start < 0 or start + nbytes > size:
                    raise LayoutError(
                        "a piece leaves its tensor",
                        where=where,
                        expected=f"bytes within [0, {size})",
                        found=f"[{start}, {start + nbytes})",
                    )
                _check_contiguous(buffer, where)
                columns.append((number, start, nbytes))
                buffers.append(buffer)
        src, offsets, sizes = np.array(columns, np.int64).reshape(-1, 3).T
        return cls(
            names=tuple(tensor.name for tensor in tensors),
            algorithms=tuple(tensor.algorithm for tensor in tensors),
            nbytes=np.array([tensor.nbytes for tensor in tensors], np.int64),
            table=SegmentTable.flat(dst=np.arange(len(buffers)), src=src, src_offset=offsets, nbytes=sizes),
            buffers=tuple(buffers),
        )

    def itself(self) -> Shards:
        return self

    def source(self) -> Source:
        """What is read. Raises `LayoutError` where a supply's windows are too small."""
        return Source(Buffers(self.buffers) if self.supply is None else self.supply, self.layers())

    def layers(self) -> list[Rows]:
        """The segments so that no layer holds a byte twice: mostly one, and at least one."""
        rows = merge_rows(self.table.rows)
        rows = by_position(rows)
        twice = [tensor for tensor in _interleaved(rows) if overlaps(rows[rows["src"] == tensor])]
        if not twice:
            return [rows]
        again = np.isin(rows["src"], twice)
        single = singles_of(rows[again])
        layer = _color(single)
        found = [single[layer == number] for number in range(int(layer.max()) + 1)]
        found[0] = np.concatenate([rows[~again], found[0]])
        return found

    def _check_side(self, side: str, rows: Rows, sizes: Ints, what: str) -> None:
        missing = rows[side] >= len(sizes)
        if missing.any():
            raise LayoutError(f"segments name more {what} than there are", expected=len(sizes), found=rows[side].max())
        beyond = row_extent(rows, side) > sizes[rows[side]]
        if beyond.any():
            worst = int(np.argmax(beyond))
            raise LayoutError(
                f"a segment leaves one of its {what}",
                tensor=self.names[rows["src"][worst]],
                expected=f"at most {sizes[rows[side][worst]]} bytes",
                found=row_extent(rows, side)[worst],
            )


def published(rows: Rows) -> Rows:
    """What others have to know of a layer: its source side, with rows that follow in equal steps as one segment.

    Every row stays a row: a word that two of them cut is cut for all ranks alike.
    """
    rows = by_position(rows)
    for name in ("dst", "dst_offset", "dst_stride"):
        rows[name] = 0
    step = np.diff(rows["src_offset"])
    alike = (rows["rows"] == 1) & (rows["row_bytes"] > 0)
    linked = alike[1:] & alike[:-1] & (np.diff(rows["src"]) == 0) & (np.diff(rows["row_bytes"]) == 0)
    step = np.where(linked & (step > rows["row_bytes"][:-1]), step, -np.arange(1, len(step) + 1))
    change = np.flatnonzero(np.diff(step)) + 1
    first, last = np.concatenate([[0], change]), np.concatenate([change, [len(step)]])
    first, last = first[last - first > 1], last[last - first > 1]
    # a row between two series belongs to the one before it
    first = first + (np.isin(first, last) if len(first) else 0)
    joined = np.zeros(len(rows) + 1, np.int64)
    np.add.at(joined, first + 1, 1)
    np.add.at(joined, last + 1, -1)
    rows["rows"][first] += last - first
    rows["src_stride"][first] = step[first] if len(first) else 0
    told: Rows = rows[joined[:-1].cumsum() == 0]
    return told


def _size_of(tensor: ShardedTensor) -> int:
    size = operator.index(tensor.nbytes)
    if size < 0:
        raise LayoutError("a tensor has a negative size", tensor=tensor.name, found=size)
    return size


def _bytes_of(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Host memory as numpy bytes; tensors on a device as they are."""
    for buffer in buffers:
        _check_contiguous(buffer, NOWHERE)
    try:
        device = device_of(buffers)
    except ValueError as error:
        raise LayoutError(f"pieces cannot be digested together: {error}") from error
    return tuple(map(byte_view, buffers)) if device is None else tuple(buffers)


def _check_contiguous(buffer: Buffer, where: Where) -> None:
    contiguous = buffer.flags.c_contiguous if isinstance(buffer, np.ndarray) else buffer.is_contiguous()
    if not contiguous:
        raise LayoutError("a piece is not contiguous", where=where, found=f"shape {tuple(buffer.shape)}")


def _interleaved(rows: Rows) -> list[int]:
    """Tensors some of whose sorted segments begin before the one ahead of them ends."""
    stops = span_stops(rows)
    close = (rows["src"][1:] == rows["src"][:-1]) & (rows["src_offset"][1:] < stops[:-1])
    # only neighbours are looked at, which is enough: of two that overlap, one overlaps its neighbour
    tensors: list[int] = np.unique(rows["src"][1:][close]).tolist()
    return tensors


def _color(single: Rows) -> npt.NDArray[Any]:
    """Per single of sorted ones, the lowest layer that is free where it begins."""
    layers, busy, free = np.zeros(len(single), np.int64), [], []  # type: ignore[var-annotated]
    count, tensor = 0, -1
    for number, (src, start, stop) in enumerate(
        zip(single["src"].tolist(), single["src_offset"].tolist(), span_stops(single).tolist(), strict=True)
    ):
        if src != tensor:
            tensor, busy, free, count = src, [], [], 0
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        layers[number] = heapq.heappop(free)
        heapq.heappush(busy, (stop, int(layers[number])))
    return layers
