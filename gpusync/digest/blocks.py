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

from gpusync.digest.batch_plan import BLOCK_WORDS, BatchPlan
from gpusync.digest.exchange import Bytes, Program, Round, Seat, nothing
from gpusync.digest.fragments import copy_to_source, on_host, zeros_on
from gpusync.digest.host_chain import advance_on_host
from gpusync.digest.intervals import ByTensor, Ints
from gpusync.digest.routes import SUMS_ROW_BYTES, Routes, Runs
from gpusync.digest.supply import Source
from gpusync_kernels.chain import Links, advance, chain_digests, hex_digests
from gpusync_kernels.segments import SegmentTable
from gpusync_kernels.sums import Sums, add_words, bind_sums, block_sums
from gpusync_kernels.xxh3 import LANES, START, STRIPE_BYTES, WORD_BYTES, SumsLayout

U64 = npt.NDArray[np.uint64]


def block_digests(routes: Routes, tables: Sequence[ByTensor], source: Source, seat: Seat) -> Program[dict[int, bytes]]:
    """The digests of the routed tensors whose chain ends on this rank, 16 bytes each.

    `tables[r]` is what rank r has of them, the one of this rank as parts of the layers of `source`.
    """
    lanes = np.tile(START, (len(routes.nbytes), 1))
    digests: dict[int, bytes] = {}
    for batch in routes.batches(seat.budget_bytes):
        plan = BatchPlan(routes, tables, batch, seat.rank)
        work = _Work(plan, source)
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


@dataclass(slots=True)
class _Work:
    """This rank's part of a batch: its sums and what it assembles."""

    plan: BatchPlan
    source: Source
    sums: Sums = None
    fragments: Any = None
    tails: Any = None

    def messages(self) -> list[Bytes]:
        """To every rank: the sums it needs of this one, then fragments."""
        plan = self.plan
        self._sum()
        parts = plan.fragments[plan.rank].split(on_host(self.fragments), plan.ranks)
        outgoing = []
        for receiver, part in enumerate(parts):
            rows = plan.sums_for(plan.rank, receiver)
            sums = _take_rows(self.sums, plan.sums_rows(rows)).reshape(-1).view(np.uint8) if len(rows) else part[:0]
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
                _add_rows(self.sums, plan.sums_rows(rows), sums)
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
        step = advance_on_host if isinstance(self.sums, np.ndarray) else advance
        lanes[number] = step(_layout_of(plan.layout, tensor), self.sums, Links(lanes[number], first, stop))
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
        """Reads this rank's bytes of the batch, each once: their sums, and the fragments among them."""
        plan, fragments = self.plan, self.plan.fragments[self.plan.rank]
        self.sums = np.zeros((plan.layout.allocated_rows, LANES), np.uint64) if not len(plan.mine) else None
        self.fragments = zeros_on(self.source.device, fragments.nbytes)
        rows = fragments.in_payload()
        for window in self.source.windows(plan.mine):
            bound = bind_sums(SegmentTable(window.rows), plan.layout, dst=window.buffers)
            self.sums = block_sums(bound, self.sums)
            if len(rows):
                copy_to_source(window.find(rows), self.fragments, window.buffers)

    def _add_words(self, values: U64) -> None:
        plan = self.plan
        if not len(values):
            return
        rows, index = np.unique(plan.words // BLOCK_WORDS, return_inverse=True)
        sums = np.zeros((len(rows), LANES), np.uint64)
        # a layout in which word i is in row `index[i]`
        layout = SumsLayout(values, values, values, index - plan.words // BLOCK_WORDS, len(rows))  # type: ignore[arg-type]
        add_words(sums, layout, np.arange(len(values)), plan.words, values)
        _add_rows(self.sums, plan.sums_rows(rows), sums)


def _layout_of(layout: SumsLayout, tensors: Ints) -> SumsLayout:
    """The layout of some tensors, over the same rows."""
    names = ("nbytes", "blocks", "words", "first_row")
    return replace(layout, **{name: getattr(layout, name)[tensors] for name in names})


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
