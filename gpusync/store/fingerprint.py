"""A rank's own digest of its slices: equal bytes under the same segments give equal fingerprints, with no exchange.

On a device it is the XXH3 chain over the rank's partial block sums, all tensors at once. In host memory the library's
XXH3-128 of the slices, segment by segment, is several times faster; fingerprints never leave their rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.store.memory import Memory
from gpusync.store.operations import held_by
from gpusync_kernels import SegmentTable, SumsLayout, bind_moves, bind_sums, copy_segments, fingerprints
from gpusync_kernels.buffers import byte_view, device_of
from gpusync_kernels.moves import strided_view
from gpusync_kernels.segments import merge_rows
from gpusync_kernels.xxh3 import SHORT_BYTES

Fingerprint = tuple[int, int]
CHUNK_BYTES = 1 << 18


def fingerprint(
    table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], *, memory: Memory
) -> dict[int, Fingerprint]:
    """By tensor (source of `table`, of `nbytes[source]` bytes as published) the digest of the bytes that its segments
    hold in `buffers`; only of tensors that have segments."""
    if device_of(buffers) is not None:
        return _on_device(table, buffers, nbytes, memory)
    views = [byte_view(buffer) for buffer in buffers]
    return {tensor: _on_host(rows, views) for tensor, rows in held_by(table).items()}


def first_difference(expected: Mapping[int, Fingerprint], found: Mapping[int, Fingerprint]) -> int | None:
    """The lowest number of a tensor whose fingerprints differ; None when all agree."""
    differing = [tensor for tensor in expected.keys() | found.keys() if expected.get(tensor) != found.get(tensor)]
    return min(differing, default=None)


def _on_host(rows: Any, views: Sequence[npt.NDArray[np.uint8]]) -> Fingerprint:
    digest = xxhash.xxh3_128()
    for to, offset, stride, _, _, _, count, row_bytes in merge_rows(rows).tolist():
        if count == 1:
            digest.update(views[to][offset : offset + row_bytes])
            continue
        held, step = strided_view(views[to], offset, stride, count, row_bytes), max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, count, step):
            digest.update(np.ascontiguousarray(held[first : first + step]))
    return _halves(digest.intdigest())


def _on_device(
    table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], memory: Memory
) -> dict[int, Fingerprint]:
    """Tensors of 240 bytes or less are brought to the host: the block form begins above."""
    held = np.unique(table.rows["src"])
    long, found = held[nbytes[held] > SHORT_BYTES], {}
    if len(long):
        values = fingerprints(bind_sums(_renumbered(table, long), SumsLayout.of(nbytes[long]), dst=buffers))
        found = {tensor: (low, high) for tensor, (low, high) in zip(long.tolist(), values.tolist(), strict=True)}
    short = {tensor: rows for tensor, rows in held_by(table).items() if nbytes[tensor] <= SHORT_BYTES}
    return found | _short(short, buffers, memory)


def _renumbered(table: SegmentTable, tensors: npt.NDArray[np.int64]) -> SegmentTable:
    rows = table.rows[np.isin(table.rows["src"], tensors)].copy()
    rows["src"] = np.searchsorted(tensors, rows["src"])
    return SegmentTable(rows)


def _short(held: Mapping[int, Any], buffers: Sequence[Any], memory: Memory) -> dict[int, Fingerprint]:
    """All of them in one copy to the host."""
    if not held:
        return {}
    table = SegmentTable(np.concatenate(list(held.values())))
    packed, nbytes = table.packed()
    gathered = memory.zeros(nbytes)
    copy_segments(bind_moves(packed.moves_from(table), dst=[gathered], src=buffers))
    view = [memory.download(gathered)]
    return {tensor: _on_host(rows, view) for tensor, rows in held_by(packed).items()}


def _halves(value: int) -> Fingerprint:
    return value & (2**64 - 1), value >> 64
