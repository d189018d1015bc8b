"""Writing a tensor's bytes of a known version into what a rank holds of it, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from gpusync.layout import ReadTensor
from gpusync.store.load import span_of
from gpusync.store.memory import Memory
from gpusync.stream import ByteSource
from gpusync_kernels import SegmentTable, bind_moves, copy_segments

WINDOW_BYTES = 16 << 20


class OldBytes(Protocol):
    """The bytes of the version that is live, if this host has them."""

    @property
    def reader(self) -> ReadTensor | None: ...


def write_back(source: ByteSource, table: SegmentTable, buffers: Sequence[Any], *, memory: Memory) -> None:
    """Copy what `table` holds of one tensor from `source`, which reads the whole of it, to the destinations."""
    if not len(table):
        return
    start, stop = span_of(table.rows)
    for at in range(start, stop, WINDOW_BYTES):
        window = np.empty(min(WINDOW_BYTES, stop - at), np.uint8)
        part = table.clipped(at, at + len(window))
        if not len(part):
            continue
        source.read_into(at, memoryview(window))
        rows = part.rows.copy()
        rows["src"], rows["src_offset"] = 0, rows["src_offset"] - at
        copy_segments(bind_moves(SegmentTable(rows), dst=buffers, src=[memory.upload(window)]))
