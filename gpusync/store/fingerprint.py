"""A rank's own digest of its slices: equal bytes under the same segments give equal fingerprints, with no exchange.

On a device it is the XXH3 chain over the rank's partial block sums, all tensors at once. In host memory the library's
XXH3-128 of the slices, segment by segment, is several times faster; fingerprints never leave their rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.store.memory import Memory
from gpusync.store.operations import held_by
from gpusync_kernels import SegmentTable, SumsLayout, bind_moves, bind_sums, copy_segments, fingerprints
from gpusync_kernels.buffers import byte_view, device_of
from gpusync_kernels.moves import Moves, strided_view
from gpusync_kernels.segments import merge_rows
from gpusync_kernels.sums import BoundSums
from gpusync_kernels.xxh3 import SHORT_BYTES

Fingerprint = tuple[int, int]
CHUNK_BYTES = 1 << 18


class BoundFingerprints:
    """Made by `bind_fingerprints`: whose bytes, and nothing left to do but to read them."""

    def __init__(
        self, table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], memory: Memory
    ) -> None:
        self.table, self._memory = table, memory
        self._pieces: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._sums: BoundSums | None = None
        self._gather: Moves | None = None
        if device_of(buffers) is None:
            self._pieces = _pieces(table, [byte_view(buffer) for buffer in buffers])
            return
        held = held_by(table)
        # Tensors of 240 bytes or less are brought to the host: the block form begins above.
        numbers = np.array(sorted(held), np.int64)
        self._long = numbers[nbytes[numbers] > SHORT_BYTES]
        if len(self._long):
            self._sums = bind_sums(_renumbered(table, self._long), SumsLayout.of(nbytes[self._long]), dst=buffers)
            self._sums.upload()
        short = [rows for tensor, rows in held.items() if nbytes[tensor] <= SHORT_BYTES]
        if short:
            here = SegmentTable(np.concatenate(short))
            self._packed, size = here.packed()
            self._gathered = memory.zeros(size)
            self._gather = bind_moves(self._packed.moves_from(here), dst=[self._gathered], src=buffers)
            self._gather.upload()

    def take(self) -> dict[int, Fingerprint]:
        """The fingerprints of what the bytes are now."""
        found: dict[int, Fingerprint] = {}
        if self._sums is not None:
            values = fingerprints(self._sums).tolist()
            found = {tensor: (low, high) for tensor, (low, high) in zip(self._long.tolist(), values, strict=True)}
        pieces = self._pieces
        if self._gather is not None:
            copy_segments(self._gather)
            pieces = _pieces(self._packed, [self._memory.download(self._gathered)])
        return found | {tensor: _digest(parts) for tensor, parts in pieces.items()}


def bind_fingerprints(
    table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], *, memory: Memory
) -> BoundFingerprints:
    """Of the bytes that `table` has of each tensor (its source, of `nbytes[source]` bytes as published) in `buffers`;
    only of tensors that have segments."""
    return BoundFingerprints(table, buffers, nbytes, memory)


def known_fingerprints(
    table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], checksums: Sequence[str | None]
) -> dict[int, Fingerprint]:
    """The fingerprints of tensors that `table` has whole, from their `checksums`: XXH3-128 in hexadecimal, or None.

    None are known on a device, where the sums of a word that rows cut are not those of the word.
    """
    rows = merge_rows(table.rows)
    if device_of(buffers) is not None or not len(rows):
        return {}
    rows = rows[np.argsort(rows["src"], kind="stable")]
    numbers, first = np.unique(rows["src"], return_index=True)
    ends = np.cumsum(rows["row_bytes"])
    starts = ends - rows["row_bytes"]
    in_order = rows["src_offset"] == starts - np.repeat(starts[first], np.diff(first, append=len(rows)))
    whole = np.logical_and.reduceat(in_order & (rows["rows"] == 1), first)
    whole &= np.add.reduceat(rows["row_bytes"], first) == nbytes[numbers]
    told = {number: checksums[number] for number in numbers[whole].tolist()}
    return {number: _halves(int(checksum, 16)) for number, checksum in told.items() if checksum is not None}


def without(table: SegmentTable, tensors: Collection[int]) -> SegmentTable:
    """The segments of all other tensors."""
    return SegmentTable(table.rows[~np.isin(table.rows["src"], list(tensors))]) if tensors else table


def first_difference(expected: Mapping[int, Fingerprint], found: Mapping[int, Fingerprint]) -> int | None:
    """The lowest number of a tensor whose fingerprints differ; None when all agree."""
    differing = [tensor for tensor in expected.keys() | found.keys() if expected.get(tensor) != found.get(tensor)]
    return min(differing, default=None)


def _pieces(table: SegmentTable, views: Sequence[npt.NDArray[np.uint8]]) -> dict[int, list[npt.NDArray[np.uint8]]]:
    """By tensor, views of the bytes to read, in order."""
    found: dict[int, list[npt.NDArray[np.uint8]]] = {}
    for to, offset, stride, tensor, _, _, count, row_bytes in merge_rows(table.rows).tolist():
        pieces = found.setdefault(tensor, [])
        if count == 1:
            pieces.append(views[to][offset : offset + row_bytes])
            continue
        view, step = strided_view(views[to], offset, stride, count, row_bytes), max(1, CHUNK_BYTES // row_bytes)
        pieces += [view[first : first + step] for first in range(0, count, step)]
    return found


def _digest(pieces: Sequence[npt.NDArray[np.uint8]]) -> Fingerprint:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece))
    return _halves(digest.intdigest())


def _halves(value: int) -> Fingerprint:
    return value & (2**64 - 1), value >> 64


def _renumbered(table: SegmentTable, tensors: npt.NDArray[np.int64]) -> SegmentTable:
    rows = table.rows[np.isin(table.rows["src"], tensors)].copy()
    rows["src"] = np.searchsorted(tensors, rows["src"])
    return SegmentTable(rows)
