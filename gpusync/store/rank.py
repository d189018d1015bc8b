"""The store of one rank's live weights: prepare a chain of versions beside them, commit it in place, roll it back.

Prepare copies the changed slices into scratch, batch by batch, applies there what the commit will apply, and digests
the result together with the other ranks: nothing live is written. What stays on the device is the steps in compact
form. Commit runs the same calls over the live params.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpusync.digest import DigestReport, Shards, sharded_digests
from gpusync.errors import LayoutError
from gpusync.layout import LayoutMap, ReadTensor, check_addresses, storage_bytes
from gpusync.mirror.workers import for_each
from gpusync.progress import Progress, counter
from gpusync.store.casts import CastBatch, CastStore
from gpusync.store.compact import StepFiles
from gpusync.store.fingerprint import first_difference
from gpusync.store.load import LoadedStep, load
from gpusync.store.memory import Memory, is_out_of_memory
from gpusync.store.operations import Operation, bind_operations, held_by
from gpusync.store.preparing import Preparing, request_of, spans_of
from gpusync.store.restore import OldBytes, write_back
from gpusync.store.tensor_update import TensorUpdate
from gpusync.store.update import ExpectedPart, PreparedUpdate
from gpusync_kernels import SegmentTable, bind_moves, copy_segments

STAGING_BYTES = 1 << 30
MIN_STAGING_BYTES = 1 << 20
LANES_FROM_BYTES = 256 << 20


class RankStore:
    """Live params under a layout map. `digest` makes checksums together with the other ranks; by default, alone."""

    def __init__(
        self,
        layout: LayoutMap,
        params: Mapping[str, torch.Tensor],
        *,
        memory: Memory,
        casts: CastStore,
        digest: Callable[[Shards], DigestReport] | None = None,
        held_by_any: Mapping[str, int] | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`held_by_any`: what some rank of the group holds and patches, with the most bytes of it that any rank holds,
        the same on every rank; None: what this one does. Other tensors of the checkpoint (drafts, adapters) are on no
        rank, and the mirror alone verifies them."""
        self.layout, self.memory = layout, memory
        self._params, self._casts = params, casts
        self._digest = digest or partial(sharded_digests, group=None)
        self._staging_bytes = staging_bytes
        self.held_by_any = dict(self.held_bytes() if held_by_any is None else held_by_any)

    def held_bytes(self) -> dict[str, int]:
        """The tensors of which this rank holds bytes that it can patch, and how much scratch they take."""
        names = [name for name, placement in self.layout.placements.items() if placement.is_patched]
        packed, _ = self.layout.segments(names)[0].packed()
        extent = packed.rows["rows"] * packed.rows["dst_stride"] + 32  # with what alignment may add
        sizes = np.zeros(len(names), np.int64)
        np.add.at(sizes, packed.rows["src"], extent)
        return dict(zip(names, sizes.tolist(), strict=True))

    def opaque_among(self, updates: Mapping[str, TensorUpdate]) -> dict[str, str]:
        """Those of the changed tensors that cannot be patched in place here, with the reason."""
        found = {}
        for name, update in updates.items():
            placement = self.layout.placements.get(name)
            if placement is None or placement.is_patched:
                continue
            owner = updates.get(placement.replica_of or "")
            if placement.replica_of is None:
                found[name] = placement.reason or "opaque"
            elif owner is None or (owner.algorithm, owner.checksum) != (update.algorithm, update.checksum):
                found[name] = f"`{placement.replica_of}`, which the loader writes to the same bytes, changes otherwise"
        return found

    def reserve(self, updates: Mapping[str, TensorUpdate]) -> int:
        """How much scratch an update can have here: what it needs, the staging budget, or what there is memory for."""
        needed = sum(self.held_by_any.get(name, 0) for name in updates)
        room = min(self._staging_bytes // 2, self.memory.scratch_bytes, needed)
        while True:
            try:
                self.memory.empty(room)
            except (MemoryError, torch.OutOfMemoryError) as error:
                if not is_out_of_memory(error) or room <= MIN_STAGING_BYTES:
                    raise
                room //= 2
            else:
                return room

    def prepare(
        self,
        updates: Mapping[str, TensorUpdate],
        files: StepFiles,
        *,
        room: int | None = None,
        base: OldBytes | None = None,
        progress: Progress | None = None,
    ) -> PreparedUpdate:
        """Bring the changed slices to their new state in scratch and compare digests with the published checksums.

        A collective: every rank names the same tensors in the same order, and the same `room` for scratch. `base` reads
        what should be live: with it, tensors whose live bytes are damaged are repaired, and dense changes can be rolled
        back without keeping old bytes. Raises DigestMismatchError on every rank for the first tensor that would be
        wrong; live params are not written in any case.
        """
        check_addresses(self.layout, self._params)
        updates = {name: update for name, update in updates.items() if name in self.held_by_any}
        room = self.reserve(updates) if room is None else room
        prepared = PreparedUpdate(names=tuple(updates), updates=updates, files=files, base=base)
        tell = counter(progress, sum(update.nbytes for update in updates.values()))
        work = Preparing(self, prepared, room)
        with self.memory.beside():
            for batch in self._batches(updates, room):
                work.prepare(batch)
                tell(sum(updates[name].nbytes for name in batch))
            work.scratch = None
            self._bind(prepared)
        return prepared

    def commit(self, prepared: PreparedUpdate) -> None:
        """Write the update into the live params. What `roll_back` needs is kept. Raises whatever a launch raises, with
        the params in an unknown state: roll back then."""
        check_addresses(self.layout, self._params)
        self.memory.synchronise()
        self._write_back(prepared.repaired, prepared)
        workers = self._workers(prepared.touched_bytes)
        nbytes = prepared.touched_bytes // max(1, len(prepared.lanes))
        for_each(prepared.lanes, lambda _, lane: _run(lane, prepared), workers=workers, size=lambda _: nbytes)
        self._stream(prepared)
        self._casts.commit(prepared.casts)
        self.memory.synchronise()

    def verify(self, prepared: PreparedUpdate) -> str | None:
        """After a commit: the first tensor whose live bytes are not what prepare had verified; None when all are."""
        wrong: list[str] = []

        def check(_: int, part: ExpectedPart) -> None:
            different = first_difference(part.fingerprints, part.live.take())
            if different is not None:
                wrong.append(part.names[different])

        workers = self._workers(prepared.touched_bytes)
        for_each(prepared.expected, check, workers=workers, size=lambda part: part.live.table.nbytes)
        return min(wrong, key=prepared.names.index, default=None) or self._casts.first_wrong(prepared.casts)

    def roll_back(self, prepared: PreparedUpdate) -> None:
        """Undo `commit`, or what it did before it failed: the params hold the old bytes again.

        Raises LayoutError, with the params in an unknown state, where a call failed half way and the old version is not
        on this host.
        """
        for operation in reversed(prepared.done):
            operation.revert()
        for kept in prepared.kept:
            copy_segments(kept)
        dense = {*prepared.streamed, *prepared.replaced}
        lost = prepared.begun - dense if prepared.kept else {*prepared.begun, *dense, *prepared.repaired}
        self._write_back([name for name in prepared.names if name in lost], prepared)
        self._casts.roll_back(prepared.casts)
        prepared.done, prepared.begun = [], set()
        self.memory.synchronise()

    def live(self, names: Sequence[str]) -> tuple[SegmentTable, list[torch.Tensor]]:
        """The segments of these tensors, and the storages they lie in: those only, others may be on another device."""
        table, storages = self.layout.segments(names)
        used, numbers = np.unique(table.rows["dst"], return_inverse=True)
        rows = table.rows.copy()
        rows["dst"] = numbers
        return SegmentTable(rows), storage_bytes(self._params, [storages[number] for number in used.tolist()])

    def sizes(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Bytes of these tensors as published."""
        return np.array([self._size(name) for name in names], np.int64)

    def _size(self, name: str) -> int:
        if name in self.layout.placements:
            return self.layout.placements[name].tensor_bytes
        if name in self.layout.elsewhere:
            return self.layout.elsewhere[name].nbytes
        raise LayoutError("tensor has no placement", tensor=name)

    def begin_casts(self, names: Sequence[str], base: Mapping[str, ReadTensor]) -> CastBatch:
        return self._casts.begin(names, base)

    def finish_casts(self, batch: CastBatch, prepared: PreparedUpdate) -> None:
        self._casts.finish(batch, prepared.casts)

    def digest(self, shards: Shards) -> DigestReport:
        return self._digest(shards)

    @property
    def dense_bytes(self) -> int:
        """How much of what is dense may stay on the device until the commit."""
        return self._staging_bytes // 4

    def _batches(self, updates: Mapping[str, TensorUpdate], room: int) -> Iterator[tuple[str, ...]]:
        """Tensors that go through the scratch together: the same on every rank."""
        batch: list[str] = []
        nbytes = 0
        for name in updates:
            held = self.held_by_any[name]
            if batch and nbytes + held > room:
                yield tuple(batch)
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += held
        if batch:
            yield tuple(batch)

    def _bind(self, prepared: PreparedUpdate) -> None:
        """All that can be done before the pause: operations on the live params, and copies of what they replace."""
        table, buffers = self.live(prepared.names)
        prepared.lanes = [
            list(bind_operations(chains, table, buffers, self.memory, revertible=True))
            for chains in _deal(prepared.chains, self._workers(table.nbytes))
        ]
        for operation in prepared.operations:
            operation.bound.upload()
        self._casts.bind(prepared.casts)
        prepared.touched_bytes = table.nbytes
        lost, held = {*prepared.streamed, *prepared.replaced}, held_by(table)
        if lost and (prepared.base is None or prepared.base.reader is None):
            rows = [held[number] for number, name in enumerate(prepared.names) if name in lost and number in held]
            if rows:
                prepared.kept = [self._copy_of(SegmentTable(np.concatenate(rows)), buffers)]

    def _workers(self, nbytes: int) -> int:
        """How many threads are worth starting in the pause."""
        return self.memory.pause_workers if nbytes >= LANES_FROM_BYTES else 1

    def _copy_of(self, table: SegmentTable, buffers: Sequence[Any]) -> Any:
        """Copy what `table` names out of the params; the returned moves put it back."""
        packed, nbytes = table.packed()
        kept = self.memory.empty(nbytes)
        copy_segments(bind_moves(packed.moves_from(table), dst=[kept], src=buffers))
        return bind_moves(table.moves_from(packed), dst=buffers, src=[kept])

    def _stream(self, prepared: PreparedUpdate) -> None:
        """Load and apply what was not kept, one span of a tensor at a time."""
        for name in prepared.streamed:
            prepared.begun.add(name)
            table, buffers = self.live([name])
            for part in spans_of(table, self._staging_bytes // 2):
                for step in prepared.updates[name].steps:
                    chains = load([request_of(prepared, name, step, 0, part.rows)], prepared.files, self.memory)
                    for operation in bind_operations(chains, part, buffers, self.memory, revertible=False):
                        operation.apply()
            prepared.begun.discard(name)

    def _write_back(self, names: Sequence[str], prepared: PreparedUpdate) -> None:
        """The bytes of the version that was live, into the params."""
        if not names:
            return
        reader = None if prepared.base is None else prepared.base.reader
        if reader is None:
            raise LayoutError("live bytes cannot be written back: the old version is not at hand", tensor=names[0])
        for name in names:
            table, buffers = self.live([name])
            write_back(reader(name), table, buffers, memory=self.memory)


def _run(lane: Sequence[Operation], prepared: PreparedUpdate) -> None:
    """The calls of one lane, noting what was begun and what is done."""
    for operation in lane:
        names = {prepared.names[tensor] for tensor in operation.tensors}
        prepared.begun.update(names)
        operation.apply()
        prepared.begun.difference_update(names)
        prepared.done.append(operation)


def _deal(chains: Mapping[int, list[LoadedStep]], count: int) -> list[dict[int, list[LoadedStep]]]:
    """Tensors dealt out to lanes, so that each has about as much to do."""
    lanes: list[dict[int, list[LoadedStep]]] = [{} for _ in range(count)]
    loads = [0] * count
    for number, chain in sorted(chains.items(), key=lambda item: -sum(step.nbytes for step in item[1])):
        lane = loads.index(min(loads))
        lanes[lane][number] = chain
        loads[lane] += sum(step.nbytes for step in chain)
    return [lane for lane in lanes if lane]
