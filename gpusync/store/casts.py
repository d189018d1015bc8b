"""Placements that the loader converts (bf16 to fp32 and the other float pairs): written by value.

What stands live is not what was published, so the published bytes of these slices are kept beside the params, in memory
of the same size, from attach on. Prepare applies a chain to a copy of them; commit converts the copy into the params,
keeping the old bytes, and the copy becomes what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpusync.layout import CastSegments, LayoutMap, ReadTensor, storage_bytes
from gpusync.store.memory import Memory
from gpusync_kernels import SegmentTable, bind_casts, cast_segments, restore_cast
from gpusync_kernels.cast import FORMATS, BoundCasts
from gpusync_kernels.segments import single_rows


@dataclass(slots=True)
class CastBatch:
    """The cast slices of a batch in their published form. `table`: sources are positions in the batch."""

    names: tuple[str, ...]
    table: SegmentTable
    sources: Any


@dataclass(slots=True)
class PreparedCasts:
    """New published bytes by tensor, and after the commit what undoes it."""

    sources: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, BoundCasts] = field(default_factory=dict)


class CastStore:
    """The published bytes of every cast slice of a rank."""

    def __init__(self, layout: LayoutMap, params: Mapping[str, torch.Tensor], *, memory: Memory) -> None:
        self._params, self._memory = params, memory
        self._slices: dict[str, tuple[CastSegments, SegmentTable, int]] = {}
        for name in layout.placements:
            segments = layout.casts([name])
            if len(segments.table):
                packed, nbytes = _published(segments).packed()
                self._slices[name] = (segments, packed, nbytes)
        self._kept: dict[str, Any] = {}
        self._pending = PreparedCasts()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slices)

    def fill(self, read: ReadTensor) -> None:
        """Read the published bytes of the version that is live."""
        for name, (_, packed, nbytes) in self._slices.items():
            data = np.zeros(nbytes, np.uint8)
            source = read(name)
            for row in single_rows(packed.rows):
                at, size = int(row["dst_offset"]), int(row["row_bytes"])
                source.read_into(int(row["src_offset"]), memoryview(data)[at : at + size])
            self._kept[name] = self._memory.upload(data)

    def begin(self, batch: Sequence[str]) -> CastBatch:
        """Copies of what is kept for the tensors of a batch, to apply steps to."""
        names = tuple(name for name in batch if name in self._slices)
        parts, rows, at = [], [], 0
        for name in names:
            _, packed, nbytes = self._slices[name]
            moved = packed.rows.copy()
            moved["src"] = batch.index(name)
            moved["dst_offset"] += at
            rows.append(SegmentTable(moved))
            parts.append(self._memory.download(self._kept[name]))
            at += nbytes
        joined = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        return CastBatch(names, SegmentTable.concat(rows), self._memory.upload(joined))

    def finish(self, batch: CastBatch) -> None:
        """Take the new bytes of a batch over into what is prepared."""
        data, at = self._memory.download(batch.sources), 0
        for name in batch.names:
            nbytes = self._slices[name][2]
            self._pending.sources[name] = self._memory.upload(data[at : at + nbytes])
            at += nbytes

    def take_prepared(self) -> PreparedCasts:
        prepared, self._pending = self._pending, PreparedCasts()
        return prepared

    def drop_pending(self) -> None:
        self._pending = PreparedCasts()

    def commit(self, prepared: PreparedCasts) -> None:
        """Convert the new bytes into the params, keeping what stood there."""
        for name, source in prepared.sources.items():
            bound = self._bind(name, source, keep=True)
            prepared.bound[name] = bound
            cast_segments(bound)
            prepared.sources[name], self._kept[name] = self._kept[name], source

    def first_wrong(self, prepared: PreparedCasts) -> str | None:
        """After a commit: the first tensor whose params are not the conversion of its published bytes."""
        for name in prepared.bound:
            segments, _, _ = self._slices[name]
            live = storage_bytes(self._params, segments.storages)
            again = [self._memory.upload(self._memory.download(buffer)) for buffer in live]
            cast_segments(self._bind(name, self._kept[name], keep=False, dst=again))
            if any(
                not np.array_equal(self._memory.download(a), self._memory.download(b))
                for a, b in zip(live, again, strict=True)
            ):
                return name
        return None

    def roll_back(self, prepared: PreparedCasts) -> None:
        for name, bound in prepared.bound.items():
            restore_cast(bound)
            prepared.sources[name], self._kept[name] = self._kept[name], prepared.sources[name]
        prepared.bound.clear()

    def _bind(self, name: str, source: Any, *, keep: bool, dst: Sequence[Any] | None = None) -> BoundCasts:
        """Element tables: the destination as the map says, the source as it lies packed."""
        segments, packed, _ = self._slices[name]
        width = FORMATS[segments.src_dtypes[0]].nbytes
        rows = segments.table.rows.copy()
        rows["src"] = 0
        rows["src_offset"], rows["src_stride"] = packed.rows["dst_offset"] // width, packed.rows["dst_stride"] // width
        buffers = storage_bytes(self._params, segments.storages) if dst is None else dst
        targets = segments.dst_dtypes
        table = SegmentTable(rows)
        probe = bind_casts(table, dst=buffers, dst_dtypes=targets, src=[source], src_dtypes=segments.src_dtypes[:1])
        if not keep:
            return probe
        old = self._memory.empty(probe.old_bytes)
        return bind_casts(
            table, dst=buffers, dst_dtypes=targets, src=[source], src_dtypes=segments.src_dtypes[:1], old=old
        )


def _published(segments: CastSegments) -> SegmentTable:
    """The source side in bytes, as a table whose destinations are yet to be packed."""
    rows = segments.table.rows.copy()
    widths = np.array([FORMATS[dtype].nbytes for dtype in segments.src_dtypes], np.int64)[rows["src"]]
    for column in ("src_offset", "src_stride", "row_bytes"):
        rows[column] *= widths
    rows["dst"], rows["dst_offset"], rows["dst_stride"] = 0, 0, rows["row_bytes"]
    return SegmentTable(rows)
