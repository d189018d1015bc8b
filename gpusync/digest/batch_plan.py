"""Of one batch of XXH3 chains, what every rank sends to which: the same on all ranks, but for where own sums lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpusync.digest.exchange import Bytes
from gpusync.digest.fragments import Fragments, cut_words
from gpusync.digest.intervals import ByTensor, Ints, merged, shared_numbers, singles_of, span_stops
from gpusync.digest.routes import SUMS_ROW_BYTES, Batch, Routes, Runs, summed_bytes
from gpusync_kernels.segments import Rows, clip_source, per_source
from gpusync_kernels.xxh3 import BLOCK_BYTES, STRIPE_BYTES, WORD_BYTES, SumsLayout

BLOCK_WORDS = BLOCK_BYTES // WORD_BYTES


class BatchPlan:
    """A row is a block of the batch, counted through its tensors from `first_row`.

    `mine`: this rank's segments in the batch. `layout`: where its sums lie, of no more blocks than it needs.
    `words`: the cut words of its chains, as row * 128 + number in the block. `fragments[r]`: what rank r has of cut
    words and last stripes; a rank assembles its words, then its stripes.
    """

    def __init__(self, routes: Routes, tables: Sequence[ByTensor], batch: Batch, rank: int) -> None:
        self.rank, self.ranks, self.batch = rank, routes.ranks, batch
        tensors = batch.tensors
        self.nbytes, self.blocks = routes.nbytes[tensors], routes.blocks[tensors]
        self.runs = routes.runs_in(batch)
        counts = batch.stop - batch.first
        self.first_row = np.cumsum(counts) - counts
        window = (batch.first * BLOCK_BYTES, np.minimum(batch.stop * BLOCK_BYTES, self.nbytes))
        held = [table.of(tensors) for table in tables]
        self.mine = _clip(held[rank], *window)
        summed = [_clip(rows, window[0], np.minimum(window[1], summed_bytes(self.nbytes))) for rows in held]
        self._rows_of_runs = self._in_rows(self.runs.tensor, self.runs.first), counts.sum()
        self._touched = [merged(*self._touched_rows(rows)) for rows in summed]
        self._sums_for: dict[tuple[int, int], Ints] = {}
        self.words, self.fragments = self._plan_fragments(summed, held)
        low = np.clip(routes.low[rank, tensors], batch.first, batch.stop)
        high = np.maximum(np.clip(routes.high[rank, tensors], batch.first, batch.stop), low)
        first_sum = np.cumsum(high - low) - (high - low)
        # block b of tensor t is at row first_row[t] + b of the layout: what lies before `low` has no row
        words = summed_bytes(self.nbytes) // WORD_BYTES
        self.layout = SumsLayout(self.nbytes, self.blocks, words, first_sum - low, int((high - low).sum()))

    @property
    def exchanges(self) -> bool:
        """Whether anything is to be put together from several ranks."""
        pairs = ((sender, receiver) for sender in range(self.ranks) for receiver in range(self.ranks))
        fragments = any((each.receiver != r).any() for r, each in enumerate(self.fragments))
        return fragments or any(len(self.sums_for(*pair)) for pair in pairs)

    @property
    def rounds(self) -> int:
        return int(self.runs.number.max(initial=-1)) + 1

    def runs_numbered(self, number: int) -> Runs:
        return self.runs.take(self.runs.number == number)

    def sums_for(self, sender: int, receiver: int) -> Ints:
        """The rows of which `sender` gives its sums: those in chains of `receiver` that the sender has a byte of."""
        pair = (sender, receiver)
        if sender == receiver:
            return np.zeros(0, np.int64)
        if pair not in self._sums_for:
            starts, end = self._rows_of_runs
            chains = self.runs.rank == receiver
            stops = np.append(starts[1:], end)
            self._sums_for[pair] = shared_numbers(*self._touched[sender], starts[chains], stops[chains])
        return self._sums_for[pair]

    def incoming(self) -> list[int]:
        return [
            len(self.sums_for(r, self.rank)) * SUMS_ROW_BYTES + self.fragments[r].sizes(self.ranks)[self.rank]
            for r in range(self.ranks)
        ]

    def sent(self) -> dict[str, int]:
        sizes = self.fragments[self.rank].sizes(self.ranks)
        rows = sum(len(self.sums_for(self.rank, r)) for r in range(self.ranks))
        return {"sums": rows * SUMS_ROW_BYTES, "words": sum(sizes) - sizes[self.rank]}

    def empty_messages(self) -> list[Bytes]:
        sizes = self.fragments[self.rank].sizes(self.ranks)
        rows = [len(self.sums_for(self.rank, r)) for r in range(self.ranks)]
        return [np.zeros(n * SUMS_ROW_BYTES + size, np.uint8) for n, size in zip(rows, sizes, strict=True)]

    def finishing(self, rank: int) -> Ints:
        """The tensors of the batch whose chain ends in it on this rank."""
        return self.runs.take((self.runs.next_rank < 0) & (self.runs.rank == rank)).tensor

    def sums_rows(self, rows: Ints) -> Ints:
        """Where this rank's sums of these rows lie."""
        tensor = np.searchsorted(self.first_row, rows, "right") - 1
        places: Ints = rows + (self.layout.first_row + self.batch.first - self.first_row)[tensor]
        return places

    def _in_rows(self, tensor: Ints, block: Ints) -> Ints:
        row: Ints = self.first_row[tensor] - self.batch.first[tensor] + block
        return row

    def _chain_of(self, rows: Ints) -> Ints:
        """The rank in whose chain each row is."""
        ranks: Ints = self.runs.rank[np.searchsorted(self._rows_of_runs[0], rows, "right") - 1]
        return ranks

    def _touched_rows(self, rows: Rows) -> tuple[Ints, Ints]:
        """Rows [first, stop) that these segments have a byte of. Where a step is at most a block, none is left out."""
        apart = (rows["rows"] > 1) & (rows["src_stride"] > BLOCK_BYTES)
        count = np.where(apart, rows["rows"], 1)
        index = np.repeat(np.arange(len(rows)), count)
        turn = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        start = rows["src_offset"][index] + turn * rows["src_stride"][index]
        size = np.where(apart, rows["row_bytes"], span_stops(rows) - rows["src_offset"])[index]
        tensor = rows["src"][index]
        last = self._in_rows(tensor, (start + size - 1) // BLOCK_BYTES)
        return self._in_rows(tensor, start // BLOCK_BYTES), last + 1

    def _plan_fragments(self, summed: Sequence[Rows], held: Sequence[Rows]) -> tuple[Ints, list[Fragments]]:
        """`(words, fragments)`."""
        cut = [cut_words(rows) for rows in summed]
        keys = [
            self._in_rows(rows["src"], rows["src_offset"] // BLOCK_BYTES) * BLOCK_WORDS
            + rows["src_offset"] // WORD_BYTES % BLOCK_WORDS
            for rows in cut
        ]
        words, inverse = np.unique(np.concatenate(keys), return_inverse=True)
        owner = self._chain_of(words // BLOCK_WORDS)
        place, end = _places(owner, self.ranks)
        index = np.split(inverse, np.cumsum([len(each) for each in keys])[:-1])
        finish = np.full(len(self.nbytes), -1)
        finish[self.runs.tensor[self.runs.next_rank < 0]] = self.runs.rank[self.runs.next_rank < 0]
        stripe, _ = _places(finish, self.ranks)
        fragments = []
        for rows, number, everything in zip(cut, index, held, strict=True):
            receiver = owner[number]
            rows["src_offset"] = place[number] * WORD_BYTES + rows["src_offset"] % WORD_BYTES
            start, stop = self.nbytes - STRIPE_BYTES, np.where(finish < 0, 0, self.nbytes)
            # cut between blocks, as windows of a supply are
            middle = np.clip(self.blocks * BLOCK_BYTES, start, self.nbytes)
            ends = [_clip(everything, start, np.minimum(middle, stop)), _clip(everything, middle, stop)]
            tail = singles_of(np.concatenate(ends))
            target = finish[tail["src"]]
            tail["src_offset"] += end[target] * WORD_BYTES + stripe[tail["src"]] * STRIPE_BYTES - start[tail["src"]]
            fragments.append(Fragments.of(np.concatenate([rows, tail]), np.concatenate([receiver, target])))
        return words[owner == self.rank], fragments


def _clip(rows: Rows, start: Ints, stop: Ints) -> Rows:
    """What lies in bytes [start, stop) of each tensor."""
    return clip_source(rows, per_source(start, rows), per_source(stop, rows))


def _places(owner: Ints, ranks: int) -> tuple[Ints, Ints]:
    """`(which of its owner's each one is, how many each rank has)`; an owner of -1 is nobody."""
    place = np.zeros(len(owner), np.int64)
    for rank in range(ranks):
        some = owner == rank
        place[some] = np.arange(int(some.sum()))
    return place, np.bincount(owner[owner >= 0], minlength=ranks)
