"""A supply for tests: copies what it is asked for to a scratch, having spoiled what it gave before, and counts."""

from __future__ import annotations

import dataclasses

import numpy as np

from gpusync.digest import ShardedTensor, Shards
from gpusync_kernels import bind_moves, copy_segments
from gpusync_kernels.segments import SegmentTable, single_rows

POISON = 0xA5


class Scratch:
    """What lies in `buffers`, at most `window_bytes` at a time.

    `times[t][i]`: how often byte i of tensor t was supplied. `asked`: (tensor, first byte) of every window, in order.
    `largest`: the most bytes that were asked for at once. `unit`: what the position and size of every row are a
    multiple of. The call numbered `fail_at` raises.
    """

    def __init__(self, buffers, nbytes, window_bytes, *, fail_at=None, device=None):
        self.buffers, self.window_bytes, self.fail_at, self.device = buffers, window_bytes, fail_at, device
        self.times = [np.zeros(size, np.int64) for size in nbytes]
        self.asked, self.largest, self.unit, self.calls = [], 0, 0, 0
        self._scratch = None

    def take(self, rows):
        if self.calls == self.fail_at:
            raise RuntimeError("the supply ran dry")
        self.calls += 1
        self._count(rows)
        if self._scratch is not None:
            self._scratch[...] = POISON
        packed, nbytes = SegmentTable(rows).packed()
        self._scratch = self._poisoned(nbytes)
        copy_segments(bind_moves(packed.moves_from(SegmentTable(rows)), dst=[self._scratch], src=self.buffers))
        return packed.rows, [self._scratch]

    def _count(self, rows):
        self.largest = max(self.largest, int((rows["rows"] * rows["row_bytes"]).sum()))
        single = single_rows(rows)
        self.unit = int(np.gcd.reduce([self.unit, *single["src_offset"], *single["row_bytes"]]))
        for tensor, start, nbytes in zip(
            *(single[n].tolist() for n in ("src", "src_offset", "row_bytes")), strict=True
        ):
            self.times[tensor][start : start + nbytes] += 1
        for tensor in np.unique(rows["src"]).tolist():
            self.asked.append((tensor, int(rows["src_offset"][rows["src"] == tensor].min())))

    def _poisoned(self, nbytes):
        host = np.full(nbytes, POISON, np.uint8)
        if self.device is None:
            return host
        import torch

        return torch.from_numpy(host).to(self.device)


def supplied(tensors: Shards | list[ShardedTensor], window_bytes: int, **options) -> Shards:
    """The same shards, but that their bytes are made when they are asked for."""
    shards = tensors if isinstance(tensors, Shards) else Shards.of(tensors)
    supply = Scratch(shards.buffers, shards.nbytes.tolist(), window_bytes, **options)
    return dataclasses.replace(shards, buffers=(), supply=supply)
