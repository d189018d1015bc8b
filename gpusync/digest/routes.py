"""Which rank runs which part of a tensor's XXH3 chain, and in which batches. Pure: the same on every rank.

Where ownership is contiguous, a block belongs to the chain of the rank that has its first byte; the accumulator goes
from rank to rank. Where it is not (columns, or very many pieces) one of the owners runs the whole chain. Other owners
of a block send it their sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusync.digest.fragments import cut_words
from gpusync.digest.intervals import ByTensor, Ints, span_stops
from gpusync_kernels.segments import Rows
from gpusync_kernels.xxh3 import BLOCK_BYTES, LANES, STRIPE_BYTES, WORD_BYTES

MAX_RUNS = 64  # of one tensor: each is a round in which the others wait
SUMS_ROW_BYTES = LANES * WORD_BYTES

# Host memory beside the sums themselves: what a rank sends it gathers and concatenates; what it receives it keeps and
# adds from; and every rank knows of every cut word, and of every row of pieces that lie further apart than blocks.
_SENT_BYTES = 3 * SUMS_ROW_BYTES
_RECEIVED_BYTES = 3 * SUMS_ROW_BYTES
_CUT_WORD_BYTES = 512
_ROW_APART_BYTES = 128
_KNOWN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks [first, stop) of each of `tensors`. The words after the last whole block count as one more block."""

    tensors: Ints
    first: Ints
    stop: Ints


@dataclass(frozen=True, slots=True)
class Runs:
    """Blocks [first, stop) of `tensor` are in the chain of `rank`; sorted, without gaps. `number` counts those of a
    tensor. `next_rank`: who goes on after it, -1 after the last.
    """

    tensor: Ints
    first: Ints
    stop: Ints
    rank: Ints
    number: Ints
    next_rank: Ints

    def take(self, some: npt.NDArray[np.bool_]) -> Runs:
        return Runs(*(getattr(self, name)[some] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of tensors alike: runs (first, stop, rank), or none where one owner runs all; blocks [low, high) per rank that
    it has bytes of; and what every rank has to know, in bytes.
    """

    runs: list[tuple[int, int, int]]
    low: Ints
    high: Ints
    known_bytes: int


class Routes:
    """For tensors of more than 240 bytes. `tables[r]` is what rank r has of them, each byte once.

    `alike[t]`: tensors with the same number have the same size and the same owners.
    """

    def __init__(self, tables: Sequence[ByTensor], tensors: Ints, nbytes: Ints, alike: Ints) -> None:
        self.ranks, self.tensors, self.nbytes = len(tables), tensors, nbytes
        self.blocks = np.maximum(nbytes - 1, 0) // BLOCK_BYTES
        self.low, self.high = (np.zeros((self.ranks, len(nbytes)), np.int64) for _ in range(2))
        self._cost = np.zeros((self.ranks, len(nbytes)))
        self._known = np.zeros(len(nbytes))
        shapes: dict[int, _Shape] = {}
        work = np.zeros(self.ranks, np.int64)
        runs: list[tuple[int, int, int, int]] = []
        for tensor in tensors.tolist():
            kind = int(alike[tensor])
            if kind not in shapes:
                rows = [table.slice(tensor) for table in tables]
                shapes[kind] = _shape(rows, int(nbytes[tensor]))
            runs += self._route(tensor, shapes[kind], work)
        self.runs = np.array(runs, np.int64).reshape(-1, 4)
        self.run_starts = np.searchsorted(self.runs[:, 0], np.arange(len(nbytes) + 1))

    @property
    def last_rank(self) -> Ints:
        """Per tensor, who makes the digest; -1 for tensors that are not routed."""
        last = np.full(len(self.nbytes), -1)
        last[self.runs[:, 0]] = self.runs[:, 3]  # sorted: the last one stays
        return last

    def batches(self, budget_bytes: int) -> Iterator[Batch]:
        """Windows of tensors in order, so that no rank needs much more than `budget_bytes` for any of them."""
        batch: list[tuple[int, int, int]] = []
        used = np.zeros(self.ranks)
        whole = self._worth(self.tensors, np.zeros_like(self.tensors), self.blocks[self.tensors] + 1)
        for tensor, worth, most in zip(self.tensors.tolist(), whole.T, whole.max(axis=0).tolist(), strict=True):
            windows = [(0, int(self.blocks[tensor]) + 1, worth)]
            if most > budget_bytes:
                windows = self._windows(tensor, budget_bytes)
            for first, stop, worth in windows:
                if batch and ((used + worth).max() > budget_bytes or batch[-1][0] == tensor):
                    yield _batch(batch)
                    batch, used = [], np.zeros(self.ranks)
                batch.append((tensor, first, stop))
                used += worth
        if batch:
            yield _batch(batch)

    def runs_in(self, batch: Batch) -> Runs:
        """The runs cut to a batch's windows; `tensor` counts in the batch."""
        first, count = self.run_starts[batch.tensors], np.diff(self.run_starts)[batch.tensors]
        owner = np.repeat(np.arange(len(count)), count)
        index = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        _, run_first, run_stop, rank = self.runs[index].T
        begin, end = np.maximum(run_first, batch.first[owner]), np.minimum(run_stop, batch.stop[owner])
        after = np.append(self.runs[:, 3], -1)[index + 1]
        same = np.append(self.runs[:, 0], -1)[index + 1] == self.runs[index, 0]
        next_rank = np.where(run_stop > end, rank, np.where(same, after, -1))
        inside = begin < end
        owner = owner[inside]
        number = np.arange(len(owner)) - np.searchsorted(owner, owner, "left")
        return Runs(owner, begin[inside], end[inside], rank[inside], number, next_rank[inside])

    def _route(self, tensor: int, shape: _Shape, work: Ints) -> list[tuple[int, int, int, int]]:
        """The tensor's runs; fills in what a block of it costs each rank."""
        end = int(self.blocks[tensor]) + 1
        self.low[:, tensor], self.high[:, tensor] = shape.low, shape.high
        self._known[tensor] = _KNOWN_BYTES + shape.known_bytes / end
        owners = np.flatnonzero(shape.low < shape.high)
        if shape.runs:
            self._cost[owners, tensor] = SUMS_ROW_BYTES
            return [(tensor, *run) for run in shape.runs]
        # the owner with the least to do so far
        rank = int(owners[np.argmin(work[owners])])
        work[rank] += end
        self.low[rank, tensor], self.high[rank, tensor] = 0, end
        self._cost[owners, tensor] = SUMS_ROW_BYTES + _SENT_BYTES
        self._cost[rank, tensor] = SUMS_ROW_BYTES + _RECEIVED_BYTES * (len(owners) - 1)
        return [(tensor, 0, end, rank)]

    def _windows(self, tensor: int, budget_bytes: int) -> list[tuple[int, int, npt.NDArray[np.float64]]]:
        """Blocks [first, stop) of a tensor that does not fit, and what they cost each rank."""
        end = int(self.blocks[tensor]) + 1
        step = max(1, int(budget_bytes / (self._cost[:, tensor].max() + self._known[tensor])))
        edges = [*range(0, end, step), end]
        if len(edges) > 2 and edges[-2] == end - 1 and self.nbytes[tensor] - (end - 1) * BLOCK_BYTES < STRIPE_BYTES:
            del edges[-2]  # the last stripe begins in the block before
        one = np.array([tensor])
        return [(a, b, self._worth(one, np.array([a]), np.array([b]))[:, 0]) for a, b in itertools.pairwise(edges)]

    def _worth(self, tensors: Ints, first: Ints, stop: Ints) -> npt.NDArray[np.float64]:
        """[ranks, tensors]: what blocks [first, stop) of each cost each rank, in bytes."""
        held = np.minimum(stop, self.high[:, tensors]) - np.maximum(first, self.low[:, tensors])
        known = (stop - first) * self._known[tensors]
        worth: npt.NDArray[np.float64] = np.maximum(held, 0) * self._cost[:, tensors] + known
        return worth


def summed_bytes(nbytes: Ints) -> Ints:
    """Per tensor, how many of its first bytes are in block sums; the rest is in the last stripe alone."""
    return (nbytes - 1) // STRIPE_BYTES * STRIPE_BYTES


def _shape(ranks: Sequence[Rows], nbytes: int) -> _Shape:
    low = np.array([rows["src_offset"].min() // BLOCK_BYTES if len(rows) else 0 for rows in ranks], np.int64)
    high = np.array([-(-span_stops(rows).max() // BLOCK_BYTES) if len(rows) else 0 for rows in ranks], np.int64)
    words = sum(len(cut_words(rows)) for rows in ranks)
    apart = sum(int(rows["rows"][rows["src_stride"] > BLOCK_BYTES].sum()) for rows in ranks)
    return _Shape(_runs(ranks, nbytes), low, high, _CUT_WORD_BYTES * words + _ROW_APART_BYTES * apart)


def _runs(ranks: Sequence[Rows], nbytes: int) -> list[tuple[int, int, int]]:
    """Runs of a tensor whose owners have contiguous pieces; none where they have not, or too many."""
    rows = np.concatenate(ranks)
    rank = np.repeat(np.arange(len(ranks)), [len(each) for each in ranks])
    if (rows["rows"] > 1).any() or not len(rows):
        return []
    order = np.argsort(rows["src_offset"])
    starts = -(-rows["src_offset"][order] // BLOCK_BYTES)
    stops = np.append(starts[1:], (nbytes - 1) // BLOCK_BYTES + 1)
    some = starts < stops
    starts, rank = starts[some], rank[order][some]
    change = np.flatnonzero(np.diff(rank, prepend=-1))
    if len(change) > MAX_RUNS:
        return []
    starts, rank = starts[change], rank[change]
    stops = np.append(starts[1:], (nbytes - 1) // BLOCK_BYTES + 1)
    return list(zip(starts.tolist(), stops.tolist(), rank.tolist(), strict=True))


def _batch(windows: list[tuple[int, int, int]]) -> Batch:
    tensors, first, stop = np.array(windows, np.int64).T
    return Batch(tensors, first, stop)
