"""Placements that the loader converts (bf16 to fp32 and the other float pairs): written by value.

What stands live is not what was published, so the published bytes of these slices are kept beside the params, in memory
of the same size, from attach on. Prepare applies a chain to a copy of them; commit converts the copy into the params,
keeping the old bytes, and the copy becomes what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpusync.layout import CastSegments, LayoutMap, ReadTensor, storage_bytes
from gpusync.store.fingerprint import BoundFingerprints, Fingerprint, bind_fingerprints
from gpusync.store.memory import Memory
from gpusync_kernels import SegmentTable, bind_casts, bind_moves, cast_segments, copy_segments, restore_cast
from gpusync_kernels.cast import FORMATS, BoundCasts
from gpusync_kernels.segments import PACK_ALIGN, single_rows

Buffer = Any


@dataclass(frozen=True, slots=True)
class CastBatch:
    """The cast slices of some tensors in their published form. `table`: sources are positions among the tensors asked
    for, destination 0 is `data`. `sources`: each tensor's part of `data`."""

    sources: Mapping[str, Buffer]
    table: SegmentTable
    data: Buffer


@dataclass(slots=True)
class PreparedCasts:
    """New published bytes by tensor, the fingerprints of what they convert to, and the conversion with room for what it
    replaces. `live`: the params' own fingerprints. `replaced`, from the commit on: the published bytes before it."""

    sources: dict[str, Buffer] = field(default_factory=dict)
    expected: dict[str, Fingerprint] = field(default_factory=dict)
    replaced: dict[str, Buffer] = field(default_factory=dict)
    bound: BoundCasts | None = None
    live: BoundFingerprints | None = None


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
        self._kept: dict[str, Buffer] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slices)

    def fill(self, read: ReadTensor, names: Iterable[str] | None = None) -> None:
        """Read the published bytes of the version that is live; of all tensors, unless some are named."""
        for name in self._slices if names is None else names:
            self._kept[name] = self._memory.upload(self._read(name, read))

    def begin(self, names: Sequence[str], base: Mapping[str, ReadTensor]) -> CastBatch:
        """Copies of what is kept of these tensors, to apply steps to; of those in `base`, as it reads them."""
        mine = [name for name in names if name in self._slices]
        starts, total = {}, 0
        for name in mine:
            starts[name], total = total, total + -(-self._slices[name][2] // PACK_ALIGN) * PACK_ALIGN
        data = self._memory.empty(total)
        views = {name: data[at : at + self._slices[name][2]] for name, at in starts.items()}
        rows = []
        for name in mine:
            if name in base:
                self._copy(self._memory.upload(self._read(name, base[name])), views[name])
            else:
                self._copy(self._kept[name], views[name])
            moved = self._slices[name][1].rows.copy()
            moved["src"], moved["dst"] = names.index(name), 0
            moved["dst_offset"] += starts[name]
            rows.append(SegmentTable(moved))
        return CastBatch(sources=views, table=SegmentTable.concat(rows), data=data)

    def finish(self, batch: CastBatch, prepared: PreparedCasts) -> None:
        """Add the new bytes of a batch to what is prepared."""
        if not batch.sources:
            return
        names = tuple(batch.sources)
        segments, table = self._join(names)
        packed, nbytes = _live_bytes(segments, table).packed()
        made = self._memory.empty(nbytes)
        widths = _widths(segments.dst_dtypes)[table.rows["dst"]]
        rows = table.rows.copy()
        rows["dst_offset"], rows["dst_stride"] = (
            packed.rows["dst_offset"] // widths,
            packed.rows["dst_stride"] // widths,
        )
        targets = [made] * len(segments.dst_dtypes)
        cast_segments(
            bind_casts(
                SegmentTable(rows),
                dst=targets,
                dst_dtypes=segments.dst_dtypes,
                src=list(batch.sources.values()),
                src_dtypes=segments.src_dtypes,
            )
        )
        prepared.sources.update(batch.sources)
        found = self._fingerprints(names, packed, [made]).take()
        prepared.expected.update({name: found[number] for number, name in enumerate(names)})

    def bind(self, prepared: PreparedCasts) -> None:
        """All that a commit needs, ahead of it."""
        if not prepared.sources:
            return
        names = tuple(prepared.sources)
        segments, table = self._join(names)
        options: dict[str, Any] = {
            "dst": storage_bytes(self._params, segments.storages),
            "dst_dtypes": segments.dst_dtypes,
            "src": [prepared.sources[name] for name in names],
            "src_dtypes": segments.src_dtypes,
        }
        old = self._memory.empty(bind_casts(table, **options).old_bytes)
        prepared.bound = bind_casts(table, **options, old=old)
        prepared.bound.upload()
        prepared.live = self._fingerprints(names, _live_bytes(segments, table), options["dst"])

    def commit(self, prepared: PreparedCasts) -> None:
        """Convert the new bytes into the params, keeping what stood there."""
        if prepared.bound is None:
            return
        prepared.replaced = {name: self._kept[name] for name in prepared.sources}
        cast_segments(prepared.bound)
        self._kept.update(prepared.sources)

    def first_wrong(self, prepared: PreparedCasts) -> str | None:
        """After a commit: the first tensor whose params are not the conversion of its published bytes."""
        if prepared.live is None:
            return None
        now = prepared.live.take()
        return next((name for n, name in enumerate(prepared.sources) if now[n] != prepared.expected[name]), None)

    def roll_back(self, prepared: PreparedCasts) -> None:
        if prepared.bound is None or not prepared.replaced:
            return
        restore_cast(prepared.bound)
        self._kept.update(prepared.replaced)
        prepared.replaced = {}

    def _join(self, names: Sequence[str]) -> tuple[CastSegments, SegmentTable]:
        """Element tables of several tensors as one: sources as they lie packed, destinations as the map says."""
        targets: dict[tuple[str, str], int] = {}
        parts = []
        for number, name in enumerate(names):
            segments, packed, _ = self._slices[name]
            width = FORMATS[segments.src_dtypes[0]].nbytes
            rows = segments.table.rows.copy()
            pairs = list(zip(segments.storages, segments.dst_dtypes, strict=True))
            numbers = np.array([targets.setdefault(pair, len(targets)) for pair in pairs], np.int64)
            rows["src"], rows["dst"] = number, numbers[rows["dst"]]
            rows["src_offset"] = packed.rows["dst_offset"] // width
            rows["src_stride"] = packed.rows["dst_stride"] // width
            parts.append(SegmentTable(rows))
        table = SegmentTable.concat(parts)
        joined = CastSegments(
            table=table,
            storages=tuple(storage for storage, _ in targets),
            dst_dtypes=tuple(dtype for _, dtype in targets),
            src_dtypes=tuple(self._slices[name][0].src_dtypes[0] for name in names),
        )
        return joined, table

    def _fingerprints(self, names: Sequence[str], table: SegmentTable, buffers: Sequence[Buffer]) -> BoundFingerprints:
        sizes = np.zeros(len(names), np.int64)
        np.maximum.at(
            sizes, table.rows["src"], table.rows["src_offset"] + table.rows["rows"] * table.rows["src_stride"]
        )
        return bind_fingerprints(table, buffers, sizes, memory=self._memory)

    def _read(self, name: str, read: ReadTensor) -> Any:
        _, packed, nbytes = self._slices[name]
        data = np.zeros(nbytes, np.uint8)
        source = read(name)
        for row in single_rows(packed.rows):
            at, size = int(row["dst_offset"]), int(row["row_bytes"])
            source.read_into(int(row["src_offset"]), memoryview(data)[at : at + size])
        return data

    def _copy(self, source: Buffer, target: Buffer) -> None:
        whole = SegmentTable.flat(nbytes=int(source.nbytes))
        copy_segments(bind_moves(whole, dst=[target], src=[source]))


def _widths(dtypes: Sequence[str]) -> Any:
    return np.array([FORMATS[dtype].nbytes for dtype in dtypes], np.int64)


def _published(segments: CastSegments) -> SegmentTable:
    """The source side in bytes, as a table whose destinations are yet to be packed."""
    rows = segments.table.rows.copy()
    widths = _widths(segments.src_dtypes)[rows["src"]]
    for column in ("src_offset", "src_stride", "row_bytes"):
        rows[column] *= widths
    rows["dst"], rows["dst_offset"], rows["dst_stride"] = 0, 0, rows["row_bytes"]
    return SegmentTable(rows)


def _live_bytes(segments: CastSegments, table: SegmentTable) -> SegmentTable:
    """The destination side in bytes; every tensor's are counted through on the source side."""
    rows = table.rows.copy()
    widths = _widths(segments.dst_dtypes)[rows["dst"]]
    for column in ("dst_offset", "dst_stride", "row_bytes"):
        rows[column] *= widths
    rows["src_stride"] = rows["row_bytes"]
    nbytes = rows["rows"] * rows["row_bytes"]
    for number in np.unique(rows["src"]):
        mine = rows["src"] == number
        rows["src_offset"][mine] = np.cumsum(nbytes[mine]) - nbytes[mine]
    return SegmentTable(rows)
