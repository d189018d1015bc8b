"""The store of one rank's live weights: prepare a chain of deltas beside them, commit it in place, roll it back.

Prepare copies the changed slices into scratch, batch by batch, applies there what the commit will apply, and digests
the result together with the other ranks: nothing live is written. What stays on the device is the steps in compact
form. Commit runs the same calls over the live params.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gpusync.digest import DigestReport, Shards, Traffic, sharded_digests
from gpusync.errors import DigestMismatchError, LayoutError, Where
from gpusync.layout import LayoutMap, check_addresses, storage_bytes
from gpusync.store.apply import LoadedStep, Steps, load_step
from gpusync.store.casts import CastStore, PreparedCasts
from gpusync.store.compact import CompactFile, Step
from gpusync.store.fingerprint import Fingerprints, fingerprint
from gpusync.store.memory import Memory
from gpusync_kernels import SegmentTable, bind_moves, copy_segments

STAGING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorUpdate:
    """What a chain does to one tensor, the same on every rank: its steps, oldest first, and the newest published
    checksum with the version that publishes it."""

    nbytes: int
    steps: Sequence[Step]
    algorithm: str
    checksum: str
    where: Where


@dataclass(slots=True, kw_only=True)
class PreparedUpdate:
    """A verified update that waits for its commit. Holds device memory proportional to what changed."""

    names: tuple[str, ...]
    steps: Steps
    casts: PreparedCasts
    expected: Fingerprints
    traffic: Traffic
    kept: list[Any] = field(default_factory=list)

    @property
    def changes_nothing_here(self) -> bool:
        return not self.names


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
        held_by_any: Collection[str] | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`held_by_any`: what some rank of the group holds and patches, the same on every rank; None: what this one
        does. Other tensors of the checkpoint (drafts, adapters) are on no rank, and the mirror alone verifies them."""
        self.layout, self._params, self._memory, self._casts = layout, params, memory, casts
        self._digest = digest or partial(sharded_digests, group=None)
        self._staging_bytes = staging_bytes
        self.held_by_any = frozenset(self.held if held_by_any is None else held_by_any)

    @property
    def held(self) -> frozenset[str]:
        """The tensors of which this rank holds bytes that it can patch."""
        return frozenset(name for name, placement in self.layout.placements.items() if placement.is_patched)

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

    def prepare(self, updates: Mapping[str, TensorUpdate], file: CompactFile) -> PreparedUpdate:
        """Bring the changed slices to their new state in scratch and compare digests with the published checksums.

        A collective: every rank names the same tensors in the same order. Raises DigestMismatchError on every rank for
        the first tensor that would be wrong; live params are not written in any case.
        """
        check_addresses(self.layout, self._params)
        traffic = Traffic()
        updates = {name: update for name, update in updates.items() if name in self.held_by_any}
        names = tuple(updates)
        loaded: dict[int, Sequence[LoadedStep]] = {}
        expected: list[Fingerprints] = []
        for batch in self._batches(updates):
            found = self._prepare_batch(batch, updates, file, loaded, first=names.index(batch[0]), traffic=traffic)
            expected.append(found)
        casts = self._casts.take_prepared()
        return PreparedUpdate(
            names=names,
            steps=Steps(loaded),
            casts=casts,
            expected=Fingerprints.join(expected),
            traffic=traffic,
        )

    def commit(self, prepared: PreparedUpdate) -> None:
        """Write the update into the live params. What `roll_back` needs is kept. Raises whatever a launch raises, with
        the params in an unknown state: roll back then."""
        check_addresses(self.layout, self._params)
        table, buffers = self._live(prepared.names)
        self._memory.synchronise()
        prepared.kept = [self._keep(prepared.steps.replaced(table), buffers)]
        prepared.steps.apply(table, buffers, keep_old=True)
        self._casts.commit(prepared.casts)
        self._memory.synchronise()

    def verify(self, prepared: PreparedUpdate) -> str | None:
        """After a commit: the first tensor whose live bytes are not what prepare had verified; None when all are."""
        table, buffers = self._live(prepared.names)
        sizes = self._sizes(prepared.names)
        now = fingerprint(table, buffers, sizes, memory=self._memory)
        wrong = prepared.expected.first_difference(now)
        if wrong is not None:
            return prepared.names[wrong]
        return self._casts.first_wrong(prepared.casts)

    def roll_back(self, prepared: PreparedUpdate) -> None:
        """Undo `commit`: the params hold the old bytes again."""
        table, buffers = self._live(prepared.names)
        prepared.steps.revert(table, buffers)
        for kept in prepared.kept:
            copy_segments(kept)
        self._casts.roll_back(prepared.casts)
        self._memory.synchronise()

    def fingerprints(self, names: Sequence[str]) -> Fingerprints:
        """Of the live bytes of these tensors as this rank holds them."""
        table, buffers = self._live(names)
        return fingerprint(table, buffers, self._sizes(names), memory=self._memory)

    def _prepare_batch(
        self,
        batch: Sequence[str],
        updates: Mapping[str, TensorUpdate],
        file: CompactFile,
        loaded: dict[int, Sequence[LoadedStep]],
        *,
        first: int,
        traffic: Traffic,
    ) -> Fingerprints:
        table, buffers = self._live(batch)
        packed, nbytes = table.packed()
        scratch = self._memory.empty(nbytes)
        copy_segments(bind_moves(packed.moves_from(table), dst=[scratch], src=buffers))
        held = {int(source) for source in np.unique(table.rows["src"])}
        cast = self._casts.begin(batch)
        chains = {
            number: [load_step(step, file, self._memory) for step in updates[name].steps]
            for number, name in enumerate(batch)
            if number in held or name in cast.names
        }
        loaded.update({first + number: chain for number, chain in chains.items()})
        steps = Steps(chains)
        steps.apply(packed, [scratch], keep_old=False)
        steps.apply(cast.table, [cast.sources], keep_old=False)
        self._compare(batch, updates, packed, scratch, cast.table, cast.sources, traffic)
        self._casts.finish(cast)
        return fingerprint(packed, [scratch], self._sizes(batch), memory=self._memory)

    def _compare(
        self,
        batch: Sequence[str],
        updates: Mapping[str, TensorUpdate],
        packed: SegmentTable,
        scratch: Any,
        cast_table: SegmentTable,
        cast_sources: Any,
        traffic: Traffic,
    ) -> None:
        moved = cast_table.rows.copy()
        moved["dst"] = 1
        shards = Shards(
            names=tuple(batch),
            algorithms=tuple(updates[name].algorithm for name in batch),
            nbytes=self._sizes(batch),
            table=SegmentTable.concat([packed, SegmentTable(moved)]),
            buffers=(scratch, cast_sources),
        )
        report = self._digest(shards)
        traffic.add(report.traffic)
        for name, found in zip(batch, report.digests, strict=True):
            if found != updates[name].checksum:
                raise DigestMismatchError(
                    f"the {updates[name].algorithm} digest of the would-be state is not the published checksum; "
                    "nothing was changed",
                    where=updates[name].where,
                    expected=updates[name].checksum,
                    found=found,
                )

    def _batches(self, updates: Mapping[str, TensorUpdate]) -> Iterator[list[str]]:
        """Tensors that go through the scratch together: the same on every rank, by their whole sizes."""
        batch: list[str] = []
        nbytes = 0
        for name, update in updates.items():
            if batch and nbytes + update.nbytes > self._staging_bytes:
                yield batch
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += update.nbytes
        if batch:
            yield batch

    def _live(self, names: Sequence[str]) -> tuple[SegmentTable, list[torch.Tensor]]:
        table, storages = self.layout.segments(names)
        return table, storage_bytes(self._params, storages)

    def _sizes(self, names: Sequence[str]) -> Any:
        forms = {**self.layout.elsewhere}
        sizes = []
        for name in names:
            placement = self.layout.placements.get(name)
            if placement is None and name not in forms:
                raise LayoutError("tensor has no placement", tensor=name)
            sizes.append(forms[name].nbytes if placement is None else placement.tensor_bytes)
        return np.array(sizes, np.int64)

    def _keep(self, table: SegmentTable, buffers: Sequence[Any]) -> Any:
        """Copy what `table` names out of the params; the returned moves put it back."""
        packed, nbytes = table.packed()
        kept = self._memory.empty(nbytes)
        copy_segments(bind_moves(packed.moves_from(table), dst=[kept], src=buffers))
        return bind_moves(table.moves_from(packed), dst=buffers, src=[kept])
