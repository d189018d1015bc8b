"""XXH3-128 of tensors over 240 bytes that several ranks hold parts of: block sums, exchange, chain.

Per batch: every rank sums the words it has; sums of blocks that are not in its own chain, cut words and last stripes go
to the rank in whose chain they are; then the chains run, and where a chain goes on elsewhere its accumulator, 64 bytes,
is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.digest.exchange import Bytes, Program, Round, Seat, nothing
from gpusync.digest.fragments import Fragments, cut_words
from gpusync.digest.intervals import ByTensor, Ints, singles_of, span_stops
from gpusync.digest.routes import SUMS_ROW_BYTES, Batch, Routes, Runs, summed_bytes
from gpusync_kernels.buffers import Buffer
from gpusync_kernels.chain import Links, advance, chain_digests, hex_digests
from gpusync_kernels.segments import Rows, SegmentTable, clip_source, per_source, single_rows
from gpusync_kernels.sums import Sums, add_words, bind_sums, block_sums
from gpusync_kernels.xxh3 import BLOCK_BYTES, LANES, START, STRIPE_BYTES, WORD_BYTES, SumsLayout

U64 = npt.NDArray[np.uint64]

BLOCK_WORDS = BLOCK_BYTES // WORD_BYTES


def block_digests(
    routes: Routes, tables: Sequence[ByTensor], buffers: Sequence[Buffer], seat: Seat
) -> Program[dict[int, bytes]]:
    """The digests of the routed tensors whose chain ends on this rank, 16 bytes each.

    `tables[r]` is what rank r has of them, the one of this rank with destinations in `buffers`.
    """
    lanes = np.tile(START, (len(routes.nbytes), 1))
    digests: dict[int, bytes] = {}
    for batch in routes.batches(seat.budget_bytes):
        plan = _Plan(routes, tables, batch, seat.rank)
        work = _Work(plan, buffers)
        if plan.exchanges:
            outgoing = seat.attempts.run(work.messages, plan.empty_messages)
            received = yield Round(outgoing=outgoing, incoming=plan.incoming(), sent=plan.sent())
            seat.attempts.run(partial(work.absorb, received), nothing)
        else:
            seat.attempts.run(work.alone, nothing)
        for number in range(plan.rounds):
            runs = plan.runs_numbered(number)
            digests |= seat.attempts.run(partial(work.advance, runs, lanes), dict)
            if ((runs.next_rank >= 0) & (runs.next_rank != runs.rank)).any():
                yield from _hand_over(runs, batch.tensors, lanes, seat)
    return digests


def _hand_over(runs: Runs, tensors: Ints, lanes: U64, seat: Seat) -> Program[None]:
    """The accumulators of these runs to the ranks that go on with them, in `lanes`."""
    moved = (runs.next_rank >= 0) & (runs.next_rank != runs.rank)
    tensor, source, target = tensors[runs.tensor[moved]], runs.rank[moved], runs.next_rank[moved]
    going = [tensor[(source == seat.rank) & (target == r)] for r in range(seat.ranks)]
    coming = [tensor[(source == r) & (target == seat.rank)] for r in range(seat.ranks)]
    received = yield Round(
        outgoing=[lanes[each].reshape(-1).view(np.uint8) for each in going],
        incoming=[len(each) * SUMS_ROW_BYTES for each in coming],
        sent={"accumulators": sum(map(len, going)) * SUMS_ROW_BYTES},
    )
    for each, payload in zip(coming, received, strict=True):
        lanes[each] = _words(payload).reshape(-1, LANES)


class _Plan:
    """Of one batch, what everyone sends to whom. The same on every rank but for the layout of its own sums.

    A row is a block of the batch, counted through its tensors from `first_row`; `chain[row]` is the rank whose chain it
    is in, `has[r, row]` whether rank r has a summed byte of it.
    """

    def __init__(self, routes: Routes, tables: Sequence[ByTensor], batch: Batch, rank: int) -> None:
        self.rank, self.ranks, self.batch = rank, routes.ranks, batch
        tensors = batch.tensors
        self.nbytes = routes.nbytes[tensors]
        self.blocks = routes.blocks[tensors]
        self.runs = routes.runs_in(batch)
        counts = batch.stop - batch.first
        self.first_row = np.cumsum(counts) - counts
        self.chain = np.repeat(self.runs.rank, self.runs.stop - self.runs.first)
        window = (batch.first * BLOCK_BYTES, np.minimum(batch.stop * BLOCK_BYTES, self.nbytes))
        held = [table.of(tensors) for table in tables]
        self.mine = _clip(held[rank], *window)
        summed = [_clip(rows, window[0], np.minimum(window[1], summed_bytes(self.nbytes))) for rows in held]
        self.has = np.stack([self._rows_with(rows) for rows in summed])
        self.words, self.fragments = self._plan_fragments(summed, held)
        low = np.clip(routes.low[rank, tensors], batch.first, batch.stop)
        high = np.maximum(np.clip(routes.high[rank, tensors], batch.first, batch.stop), low)
        first_sum = np.cumsum(high - low) - (high - low)
        # block b of tensor t is at row first_row[t] + b of the layout: what lies before `low` has no row
        words = summed_bytes(self.nbytes) // WORD_BYTES
        self.layout = SumsLayout(self.nbytes, self.blocks, words, first_sum - low, int((high - low).sum()))
        shift = self.layout.first_row + batch.first - self.first_row
        self.sums_row = np.arange(len(self.chain)) + np.repeat(shift, counts)

    @property
    def exchanges(self) -> bool:
        """Whether anything is to be put together from several ranks."""
        elsewhere = any((self.has[r] & (self.chain != r)).any() for r in range(self.ranks))
        return elsewhere or any((each.receiver != r).any() for r, each in enumerate(self.fragments))

    @property
    def rounds(self) -> int:
        return int(self.runs.number.max(initial=-1)) + 1

    def runs_numbered(self, number: int) -> Runs:
        some = self.runs.number == number
        names = ("tensor", "first", "stop", "rank", "number", "next_rank")
        return Runs(*(getattr(self.runs, name)[some] for name in names))

    def sums_for(self, sender: int, receiver: int) -> Ints:
        """The rows of which `sender` gives its sums to `receiver`."""
        if sender == receiver:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.has[sender] & (self.chain == receiver))

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
        last = (self.runs.next_rank < 0) & (self.runs.rank == rank)
        tensors: Ints = self.runs.tensor[last]
        return tensors

    def _row_of(self, rows: Rows) -> Ints:
        """The row of each segment's first byte."""
        tensor = rows["src"]
        row: Ints = self.first_row[tensor] - self.batch.first[tensor] + rows["src_offset"] // BLOCK_BYTES
        return row

    def _rows_with(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows these segments have a byte of. Where a step is no longer than a block, every block has one."""
        apart = (rows["rows"] > 1) & (rows["src_stride"] > BLOCK_BYTES)
        rows = np.concatenate([rows[~apart], single_rows(rows[apart])])
        change = np.zeros(len(self.chain) + 1, np.int32)
        first = self._row_of(rows)
        np.add.at(change, first, 1)
        blocks = (span_stops(rows) - 1) // BLOCK_BYTES - rows["src_offset"] // BLOCK_BYTES
        np.add.at(change, first + blocks + 1, -1)
        return change[:-1].cumsum() > 0

    def _plan_fragments(self, summed: Sequence[Rows], held: Sequence[Rows]) -> tuple[Ints, list[Fragments]]:
        """`(words, fragments of every rank)`. Each rank assembles its cut words, then the last stripes it needs.

        `words`: the cut words of this rank's chains, as row * 128 + number in the block.
        """
        cut = [cut_words(rows) for rows in summed]
        keys = [self._row_of(rows) * BLOCK_WORDS + rows["src_offset"] // WORD_BYTES % BLOCK_WORDS for rows in cut]
        words, inverse = np.unique(np.concatenate(keys), return_inverse=True)
        owner = self.chain[words // BLOCK_WORDS]
        place, end = _places(owner, self.ranks)
        index = np.split(inverse, np.cumsum([len(each) for each in keys])[:-1])
        finish = np.full(len(self.nbytes), -1)
        finish[self.runs.tensor[self.runs.next_rank < 0]] = self.runs.rank[self.runs.next_rank < 0]
        stripe, _ = _places(finish, self.ranks)
        fragments = []
        for rows, number, everything in zip(cut, index, held, strict=True):
            receiver = owner[number]
            rows["src_offset"] = place[number] * WORD_BYTES + rows["src_offset"] % WORD_BYTES
            start = self.nbytes - STRIPE_BYTES
            tail = singles_of(_clip(everything, np.where(finish < 0, self.nbytes, start), self.nbytes))
            target = finish[tail["src"]]
            tail["src_offset"] += end[target] * WORD_BYTES + stripe[tail["src"]] * STRIPE_BYTES - start[tail["src"]]
            fragments.append(Fragments.of(np.concatenate([rows, tail]), np.concatenate([receiver, target])))
        return words[owner == self.rank], fragments


@dataclass(slots=True)
class _Work:
    """This rank's part of a batch: its sums and what it assembles."""

    plan: _Plan
    buffers: Sequence[Buffer]
    sums: Sums = None
    tails: Any = None

    def messages(self) -> list[Bytes]:
        """To every rank: the sums it needs of this one, then fragments."""
        plan = self.plan
        self._sum()
        parts = plan.fragments[plan.rank].gather(self.buffers, plan.ranks)
        outgoing = []
        for receiver, part in enumerate(parts):
            rows = plan.sums_for(plan.rank, receiver)
            sums = _take_rows(self.sums, plan.sums_row[rows]).reshape(-1).view(np.uint8) if len(rows) else part[:0]
            outgoing.append(np.concatenate([sums, part]) if sums.size else part)
        return outgoing

    def absorb(self, received: Sequence[Bytes]) -> None:
        """Adds the sums of others and the words that were put together; keeps the last stripes."""
        plan = self.plan
        assembly = np.zeros(len(plan.words) * WORD_BYTES + len(plan.finishing(plan.rank)) * STRIPE_BYTES, np.uint8)
        for sender, payload in enumerate(received):
            rows = plan.sums_for(sender, plan.rank)
            if len(rows):
                sums = _words(payload[: len(rows) * SUMS_ROW_BYTES]).reshape(-1, LANES)
                _add_rows(self.sums, plan.sums_row[rows], sums)
            plan.fragments[sender].scatter(payload[len(rows) * SUMS_ROW_BYTES :], plan.rank, assembly)
        self._add_words(_words(assembly[: len(plan.words) * WORD_BYTES]))
        self.tails = assembly[len(plan.words) * WORD_BYTES :].reshape(-1, STRIPE_BYTES)

    def alone(self) -> None:
        """The same when nothing comes from others."""
        self.absorb(self.messages())

    def advance(self, runs: Runs, lanes: U64) -> dict[int, bytes]:
        """This rank's runs among `runs`, from and to the accumulators in `lanes`; digests where one is the last."""
        plan, mine = self.plan, runs.rank == self.plan.rank
        tensor, first = runs.tensor[mine], runs.first[mine]
        stop, last = np.minimum(runs.stop[mine], plan.blocks[tensor]), runs.next_rank[mine] < 0
        if not len(tensor):
            return {}
        number = plan.batch.tensors[tensor]
        lanes[number] = advance(_layout_of(plan.layout, tensor), self.sums, Links(lanes[number], first, stop))
        if not last.any():
            return {}
        tensor, number, stop = tensor[last], number[last], stop[last]
        tails = self.tails[np.searchsorted(plan.finishing(plan.rank), tensor)]
        found = chain_digests(
            _layout_of(plan.layout, tensor),
            self.sums,
            _beside(tails, self.sums),
            Links(lanes[number], stop, stop),
        )
        return dict(zip(number.tolist(), map(bytes.fromhex, hex_digests(found)), strict=True))

    def _sum(self) -> None:
        bound = bind_sums(SegmentTable(self.plan.mine), self.plan.layout, dst=self.buffers)
        self.sums = block_sums(bound)

    def _add_words(self, values: U64) -> None:
        plan = self.plan
        if not len(values):
            return
        rows, index = np.unique(plan.words // BLOCK_WORDS, return_inverse=True)
        sums = np.zeros((len(rows), LANES), np.uint64)
        # a layout in which word i is in row `index[i]`
        layout = SumsLayout(values, values, values, index - plan.words // BLOCK_WORDS, len(rows))  # type: ignore[arg-type]
        add_words(sums, layout, np.arange(len(values)), plan.words, values)
        _add_rows(self.sums, plan.sums_row[rows], sums)


def _layout_of(layout: SumsLayout, tensors: Ints) -> SumsLayout:
    """The layout of some tensors, over the same rows."""
    names = ("nbytes", "blocks", "words", "first_row")
    return replace(layout, **{name: getattr(layout, name)[tensors] for name in names})


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


def _words(payload: Bytes) -> U64:
    return np.ascontiguousarray(payload).view("<u8")


def _take_rows(sums: Sums, rows: Ints) -> U64:
    if isinstance(sums, np.ndarray):
        taken: U64 = sums[rows]
        return taken
    from gpusync_kernels.device.launch import upload

    on_host: U64 = sums[upload(rows, sums.device)].cpu().numpy().view(np.uint64)
    return on_host


def _add_rows(sums: Sums, rows: Ints, values: U64) -> None:
    """`sums[rows] += values`, wrapping; `rows` are unique."""
    if isinstance(sums, np.ndarray):
        sums[rows] += values
        return
    from gpusync_kernels.device.launch import upload

    sums.index_add_(0, upload(rows, sums.device), upload(values.view(np.int64), sums.device))


def _beside(array: Bytes, sums: Sums) -> Any:
    """The array where the sums are."""
    if isinstance(sums, np.ndarray):
        return array
    from gpusync_kernels.device.launch import upload

    return upload(array, sums.device)
