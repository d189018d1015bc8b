"""One prepare at work: changed slices go through scratch batch by batch, and a tensor that is larger than the scratch
in windows. What is made there is digested together with the other ranks; nothing live is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusync.digest import Shards
from gpusync.errors import DigestMismatchError
from gpusync.layout import ReadTensor
from gpusync.store.casts import CastBatch
from gpusync.store.compact import Step
from gpusync.store.fingerprint import bind_fingerprints, known_fingerprints, without
from gpusync.store.load import LoadedStep, Request, is_dense, load, span_of
from gpusync.store.operations import bind_operations, held_by
from gpusync.store.restore import write_back
from gpusync.store.update import ExpectedPart, PreparedUpdate
from gpusync_kernels import SegmentTable, bind_moves, copy_segments
from gpusync_kernels.buffers import device_of
from gpusync_kernels.segments import Rows

if TYPE_CHECKING:
    from gpusync.store.rank import RankStore

BLOCK_BYTES = 1024


@dataclass(slots=True)
class Preparing:
    """`room`: how much scratch there is, the same on all ranks."""

    store: RankStore
    prepared: PreparedUpdate
    room: int
    scratch: Any = None
    dense_bytes: int = 0

    def prepare(self, batch: tuple[str, ...]) -> None:
        """Verify the new state of some tensors, and keep what the commit needs. Raises DigestMismatchError."""
        damaged: dict[str, ReadTensor] = {}
        dense = self.dense_bytes, self.prepared.streamed_bytes
        while True:
            self.dense_bytes, self.prepared.streamed_bytes = dense
            try:
                self._attempt(batch, damaged)
            except DigestMismatchError as error:
                base = self.prepared.base
                reader = None if base is None else base.reader
                if reader is None or error.tensor not in batch or error.tensor in damaged:
                    raise
                # The delta is wrong, or what stands live: with the bytes that should stand there it shows.
                damaged[str(error.tensor)] = reader
            else:
                self.prepared.repaired += damaged
                return

    def make_room(self, nbytes: int) -> Any:
        """Scratch, made once: fresh memory costs more than what is done in it."""
        if self.scratch is None or int(self.scratch.nbytes) < nbytes:
            self.scratch = None
            self.scratch = self.store.memory.empty(max(nbytes, self.room))
        return self.scratch[:nbytes]

    def expect(
        self, names: tuple[str, ...], made: SegmentTable, scratch: Any, live: SegmentTable, buffers: Sequence[Any]
    ) -> ExpectedPart:
        """What the `live` bytes have to be after the commit: those `made` in the scratch."""
        memory, sizes = self.store.memory, self.store.sizes(names)
        updates = [self.prepared.updates[name] for name in names]
        checksums = [each.checksum if each.algorithm == "xxh3-128" else None for each in updates]
        known = known_fingerprints(made, [scratch], sizes, checksums)
        found = bind_fingerprints(without(made, known), [scratch], sizes, memory=memory).take()
        return ExpectedPart(
            names=names, fingerprints=known | found, live=bind_fingerprints(live, buffers, sizes, memory=memory)
        )

    def _attempt(self, batch: tuple[str, ...], damaged: Mapping[str, ReadTensor]) -> None:
        watch = self.prepared.watch
        casts = self.store.begin_casts(batch, damaged)
        if len(batch) == 1 and self.store.held_by_any[batch[0]] > self.room:
            self._attempt_in_windows(batch, casts, damaged)
        else:
            self._attempt_at_once(batch, casts, damaged)
        self.store.finish_casts(casts, self.prepared)
        watch.lap("fingerprint")

    def _attempt_at_once(self, batch: tuple[str, ...], casts: CastBatch, damaged: Mapping[str, ReadTensor]) -> None:
        store, prepared, watch = self.store, self.prepared, self.prepared.watch
        table, buffers = store.live(batch)
        packed, nbytes = table.packed()
        scratch = self.make_room(nbytes)
        copy_segments(bind_moves(packed.moves_from(table), dst=[scratch], src=buffers))
        for name, read in damaged.items():
            mine = SegmentTable(packed.rows[packed.rows["src"] == batch.index(name)])
            write_back(read(name), mine, [scratch], memory=store.memory)
        both = SegmentTable.concat([packed, _on_destination(casts.table, 1)])
        kept, streamed = self._apply(batch, both, [scratch, casts.data])
        watch.lap("stage")
        self._compare(batch, both, buffers=(scratch, casts.data))
        watch.lap("digest")
        self._keep(batch, kept, streamed)
        prepared.expected.append(self.expect(batch, packed, scratch, table, buffers))

    def _attempt_in_windows(self, batch: tuple[str, ...], casts: CastBatch, damaged: Mapping[str, ReadTensor]) -> None:
        store, prepared, watch = self.store, self.prepared, self.prepared.watch
        table, buffers = store.live(batch)
        if len(casts.table):
            self._apply(batch, casts.table, [casts.data])
        windows = Windows(self, batch[0], buffers, casts.data, damaged.get(batch[0]))
        both = SegmentTable.concat([table, _on_destination(casts.table, len(buffers))])
        watch.lap("stage")
        self._compare(batch, both, supply=windows)
        watch.lap("digest")
        chain = self._chain(batch[0], table)
        self._keep(batch, {} if chain is None else {0: chain}, [batch[0]] if chain is None else [])
        prepared.expected += windows.all_of(table)

    def _apply(
        self, batch: tuple[str, ...], table: SegmentTable, buffers: Sequence[Any]
    ) -> tuple[dict[int, list[LoadedStep]], list[str]]:
        """Round by round, so that of what is dense one round is held at a time. Returns what stays for the commit, by
        number in the batch, and the names of what will be loaded again."""
        prepared, held = self.prepared, held_by(table)
        direct = {int(each) for each in np.unique(table.rows["src"][table.rows["dst"] == 0])}
        kept: dict[int, list[LoadedStep]] = {number: [] for number in direct}
        streamed: set[int] = set()
        steps = {number: prepared.updates[batch[number]].steps for number in held}
        for turn in range(max(map(len, steps.values()), default=0)):
            requests = [
                request_of(prepared, batch[number], chain[turn], number, held[number])
                for number, chain in steps.items()
                if turn < len(chain)
            ]
            chains = load(requests, prepared.files, self.store.memory)
            for request in requests:
                if is_dense(request.step):
                    self._keep_dense(request.number, chains[request.number], streamed)
            for operation in bind_operations(chains, table, buffers, self.store.memory, revertible=False):
                operation.apply()
            for number in chains.keys() & direct - streamed:
                kept[number] += chains[number]
        for number in streamed:
            kept.pop(number, None)
        return kept, [batch[number] for number in sorted(streamed & direct)]

    def _keep_dense(self, number: int, loaded: Sequence[LoadedStep], streamed: set[int]) -> None:
        nbytes = sum(each.nbytes for each in loaded)
        if self.dense_bytes + nbytes > self.store.dense_bytes:
            streamed.add(number)
            self.prepared.streamed_bytes += nbytes
        else:
            self.dense_bytes += nbytes

    def _chain(self, name: str, table: SegmentTable) -> list[LoadedStep] | None:
        """What stays for the commit of a tensor that was too large for the scratch; None where it is dense."""
        steps = self.prepared.updates[name].steps
        if not len(table):
            return []
        if any(is_dense(step) for step in steps):
            self.prepared.streamed_bytes += table.nbytes * sum(is_dense(step) for step in steps)
            return None
        memory, files = self.store.memory, self.prepared.files
        requests = [request_of(self.prepared, name, step, 0, table.rows) for step in steps]
        return [loaded for each in requests for loaded in load([each], files, memory)[0]]

    def _keep(self, batch: tuple[str, ...], kept: Mapping[int, list[LoadedStep]], streamed: Sequence[str]) -> None:
        first = self.prepared.names.index(batch[0])
        self.prepared.chains.update({first + number: chain for number, chain in kept.items()})
        self.prepared.streamed += streamed

    def _compare(self, batch: tuple[str, ...], table: SegmentTable, **where: Any) -> None:
        updates = self.prepared.updates
        shards = Shards(
            names=batch,
            algorithms=tuple(updates[name].algorithm for name in batch),
            nbytes=self.store.sizes(batch),
            table=table,
            **where,
        )
        report = self.store.digest(shards)
        self.prepared.traffic.add(report.traffic)
        for name, found in zip(batch, report.digests, strict=True):
            if found != updates[name].checksum:
                raise DigestMismatchError(
                    f"the {updates[name].algorithm} digest of the would-be state is not the published checksum; "
                    "nothing was changed",
                    where=updates[name].where,
                    expected=updates[name].checksum,
                    found=found,
                )


@dataclass(slots=True)
class Windows:
    """The would-be state of one tensor, made window by window in the scratch. A `Supply` of `gpusync.digest`.

    Destinations are the params' storages, and after them the published bytes of what is cast, new already. `parts` are
    fingerprinted while they are here; a digest asks for everything once, unless other ranks have it too.
    """

    work: Preparing
    name: str
    buffers: Sequence[Any]
    cast: Any
    old: ReadTensor | None
    parts: list[ExpectedPart] = field(default_factory=list)
    window_bytes: int = field(init=False)
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        # Packing aligns rows, which may take a third more.
        self.window_bytes = max(self.work.room * 3 // 4, BLOCK_BYTES)
        self.device = device_of(self.buffers)

    def take(self, rows: Rows) -> tuple[Rows, Sequence[Any]]:
        memory, prepared = self.work.store.memory, self.work.prepared
        table = SegmentTable(rows)
        packed, nbytes = table.packed()
        scratch = self.work.make_room(nbytes)
        copy_segments(bind_moves(packed.moves_from(table), dst=[scratch], src=[*self.buffers, self.cast]))
        is_direct = rows["dst"] < len(self.buffers)
        direct = SegmentTable(packed.rows[is_direct])
        if len(direct):
            if self.old is not None:
                write_back(self.old(self.name), direct, [scratch], memory=memory)
            for step in prepared.updates[self.name].steps:
                chains = load([request_of(prepared, self.name, step, 0, direct.rows)], prepared.files, memory)
                for operation in bind_operations(chains, direct, [scratch], memory, revertible=False):
                    operation.apply()
            live = SegmentTable(rows[is_direct])
            self.parts.append(self.work.expect((self.name,), direct, scratch, live, self.buffers))
        return packed.rows, [scratch]

    def all_of(self, table: SegmentTable) -> list[ExpectedPart]:
        """Parts that are `table`, each byte once; made again if what was asked for was not."""
        tables = [part.live.table for part in self.parts]
        spans = [span_of(each.rows) for each in tables]
        apart = all(after[0] >= before[1] for before, after in pairwise(spans))
        if not apart or sum(each.nbytes for each in tables) != table.nbytes:
            self.parts.clear()
            for part in spans_of(table, self.window_bytes):
                self.take(part.rows)
        return self.parts


def request_of(prepared: PreparedUpdate, name: str, step: Step, number: int, rows: Rows) -> Request:
    update = prepared.updates[name]
    return Request(number=number, step=step, tensor_bytes=update.nbytes, rows=rows, where=update.where)


def spans_of(table: SegmentTable, room: int) -> Iterator[SegmentTable]:
    """A tensor's segments in parts of at most `room` bytes, cut at whole KiB of the tensor."""
    if table.nbytes <= room:
        if len(table):
            yield table
        return
    start, stop = span_of(table.rows)
    step = max(room // BLOCK_BYTES, 1) * BLOCK_BYTES
    for at in range(start // BLOCK_BYTES * BLOCK_BYTES, stop, step):
        part = table.clipped(at, at + step)
        if len(part):
            yield part


def _on_destination(table: SegmentTable, number: int) -> SegmentTable:
    rows = table.rows.copy()
    rows["dst"] = number
    return SegmentTable(rows)
