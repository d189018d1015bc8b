"""A supply for tests: copies what it is asked for to a scratch, which it spoils first, and counts."""

from __future__ import annotations

import dataclasses

import numpy as np

from gpusync.digest import Shards
from gpusync_kernels import bind_moves, copy_segments
from gpusync_kernels.segments import SegmentTable, single_rows

POISON = 0xA5


class Scratch:
    """What lies in `buffers`, through a scratch of `window_bytes`. `times[t][i]`: how often byte i of tensor t went.

    `windows`: (tensor, first byte, last byte) of what was asked, in order. `fail_at`: the call that raises.
    """

    device = None

    def __init__(self, buffers, nbytes, window_bytes, *, fail_at=None):
        self.buffers, self.window_bytes, self.fail_at = buffers, window_bytes, fail_at
        self.times = [np.zeros(size, np.int64) for size in nbytes]
        self.calls, self.largest = 0, 0
        self.windows = []
        self._scratch = None

    def take(self, rows):
        if self.calls == self.fail_at:
            raise RuntimeError("the supply ran dry")
        self.calls += 1
        self.largest = max(self.largest, int((rows["rows"] * rows["row_bytes"]).sum()))
        for row in single_rows(rows):
            self.times[row["src"]][row["src_offset"] : row["src_offset"] + row["row_bytes"]] += 1
        for tensor in np.unique(rows["src"]).tolist():
            single = single_rows(rows[rows["src"] == tensor])
            stops = single["src_offset"] + single["row_bytes"]
            self.windows.append((tensor, int(single["src_offset"].min()), int(stops.max())))
        packed, nbytes = SegmentTable(rows).packed()
        if self._scratch is not None:
            self._scratch[:] = POISON
        self._scratch = np.full(nbytes, POISON, np.uint8)
        copy_segments(bind_moves(packed.moves_from(SegmentTable(rows)), dst=[self._scratch], src=self.buffers))
        return packed.rows, [self._scratch]


def supplied(shards: Shards, window_bytes: int, **options) -> Shards:
    """The same shards, their bytes made when asked for."""
    supply = Scratch(shards.buffers, shards.nbytes.tolist(), window_bytes, **options)
    return dataclasses.replace(shards, buffers=(), supply=supply)
