"""A rank's own digest of its slices: equal bytes under the same segments give equal fingerprints, with no exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.store.memory import Memory
from gpusync_kernels import SegmentTable, SumsLayout, bind_moves, bind_sums, copy_segments, fingerprints
from gpusync_kernels.xxh3 import SHORT_BYTES

PAIR = 2


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """uint64 [tensors, 2]."""

    values: npt.NDArray[np.uint64]

    @classmethod
    def join(cls, parts: Sequence[Fingerprints]) -> Fingerprints:
        return cls(np.concatenate([np.empty((0, PAIR), np.uint64), *(part.values for part in parts)]))

    def first_difference(self, other: Fingerprints) -> int | None:
        """The number of the first tensor whose fingerprints differ; None when all agree."""
        differs = (self.values != other.values).any(axis=1)
        return int(np.argmax(differs)) if differs.any() else None


def fingerprint(
    table: SegmentTable, buffers: Sequence[Any], nbytes: npt.NDArray[np.int64], *, memory: Memory
) -> Fingerprints:
    """Of every tensor (source of `table`) the bytes that its segments hold in `buffers`; tensors without segments get
    zeros. Tensors of 240 bytes or less are brought to the host: the block form begins above."""
    values = np.zeros((len(nbytes), PAIR), np.uint64)
    held = np.unique(table.rows["src"])
    long = held[nbytes[held] > SHORT_BYTES]
    if len(long):
        layout = SumsLayout.of(nbytes[long])
        values[long] = fingerprints(bind_sums(_renumbered(table, long), layout, dst=buffers))
    for tensor in held[nbytes[held] <= SHORT_BYTES].tolist():
        values[tensor] = _short(SegmentTable(table.rows[table.rows["src"] == tensor]), buffers, memory)
    return Fingerprints(values)


def _renumbered(table: SegmentTable, tensors: npt.NDArray[np.int64]) -> SegmentTable:
    rows = table.rows[np.isin(table.rows["src"], tensors)].copy()
    rows["src"] = np.searchsorted(tensors, rows["src"])
    return SegmentTable(rows)


def _short(table: SegmentTable, buffers: Sequence[Any], memory: Memory) -> list[int]:
    packed, nbytes = table.packed()
    gathered = memory.zeros(nbytes)
    copy_segments(bind_moves(packed.moves_from(table), dst=[gathered], src=buffers))
    digest = xxhash.xxh3_128_intdigest(memory.download(gathered).tobytes())
    return [digest & (2**64 - 1), digest >> 64]
