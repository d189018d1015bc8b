"""What a chain of steps does to bytes, as operations over many tensors: scratch in prepare, live params in commit.

A *round* is the n-th loaded step of every tensor that has one; rounds follow each other, and within a round each action
and word width is one call over all tensors, whatever their number. An operation is bound to its buffers once, and then
has nothing left to do but launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpusync.store.load import Action, LoadedStep, PlainBytes, PlaneWords, SparseSteps, SparseWords
from gpusync.store.memory import Memory
from gpusync_kernels import (
    Change,
    Payload,
    SegmentTable,
    apply_step_planes,
    bind_changes,
    bind_moves,
    bind_planes,
    bind_sparse,
    copy_segments,
    keep_old_words,
    overwrite_words,
    restore_old_words,
    revert_step_planes,
    sparse_apply,
    sparse_revert,
    write_full_planes,
    xor_segments,
    xor_words,
)
from gpusync_kernels.segments import SEGMENT

Buffer = Any
Chains = Mapping[int, Sequence[LoadedStep]]
"""Tensor number (the source in a segment table) to its loaded steps, oldest first."""


class Operation(Protocol):
    """One call over many tensors, whose numbers are `tensors`. `apply` is not idempotent; `revert` undoes exactly one
    `apply`, and where it cannot, because the old bytes are in none of its arrays, does nothing."""

    tensors: tuple[int, ...]
    bound: Any

    def apply(self) -> None: ...

    def revert(self) -> None: ...


def bind_operations(
    chains: Chains, table: SegmentTable, buffers: Sequence[Buffer], memory: Memory, *, revertible: bool
) -> Iterator[Operation]:
    """Operations on the bytes of `table` (sources are tensor numbers, destinations `buffers`), in order, each bound
    when it is asked for. With `revertible` all that an undo needs is kept on the way."""
    held = held_by(table)
    for round_number in range(max(map(len, chains.values()), default=0)):
        groups: dict[tuple[Action, int], dict[int, LoadedStep]] = {}
        for tensor, chain in chains.items():
            if round_number < len(chain):
                step = chain[round_number]
                width = step.word_bytes if step.action in ("xor words", "overwrite words") else 0
                groups.setdefault((step.action, width), {})[tensor] = step
        for (action, width), steps in groups.items():
            yield _bind(action, width, steps, _Target(held, buffers), memory, revertible)


@dataclass(frozen=True, slots=True)
class _Target:
    held: Mapping[int, Any]
    buffers: Sequence[Buffer]

    def of(self, tensors: Sequence[int]) -> SegmentTable:
        """The segments of some tensors: those of others may cut words of the width that is asked for."""
        rows = [self.held[tensor] for tensor in tensors if tensor in self.held]
        return SegmentTable(np.concatenate(rows, dtype=SEGMENT) if rows else np.empty(0, SEGMENT))

    def shifted(self, tensor: int, start: int, stop: int, number: int) -> SegmentTable:
        """The segments of a tensor within [start, stop) of it, counted from there, as those of source `number`."""
        if tensor not in self.held:
            return SegmentTable.concat([])
        rows = SegmentTable(self.held[tensor]).clipped(start, stop).rows.copy()
        rows["src"], rows["src_offset"] = number, rows["src_offset"] - start
        return SegmentTable(rows)


def _bind(
    action: Action, width: int, steps: Mapping[int, LoadedStep], target: _Target, memory: Memory, revertible: bool
) -> Operation:
    tensors, table, buffers = tuple(steps), target.of(tuple(steps)), target.buffers
    if action in ("xor words", "overwrite words"):
        bound = bind_changes(table, dst=buffers, changes=_changes(steps), element_bytes=width)
        return XorWords(tensors, bound) if action == "xor words" else OverwriteWords(tensors, bound, revertible)
    if action == "steps":
        payloads = [
            Payload(source=tensor, data=part.data, blob=part.blob, host=part.host)
            for tensor, part in _parts(steps, SparseSteps)
        ]
        bound_steps = bind_sparse(table, dst=buffers, payloads=payloads)
        if revertible and bound_steps.undo_bytes:
            undo = memory.empty(bound_steps.undo_bytes)
            bound_steps = bind_sparse(table, dst=buffers, payloads=payloads, undo=undo)
        return BlobSteps(tensors, bound_steps)
    if action in ("step planes", "full planes"):
        return PlaneSteps(tensors, _bind_planes(steps, target), is_step=action == "step planes")
    return MovedBytes(tensors, _bind_bytes(steps, target), is_xor=action == "xor bytes")


@dataclass(slots=True)
class XorWords:
    tensors: tuple[int, ...]
    bound: Any

    def apply(self) -> None:
        xor_words(self.bound)

    def revert(self) -> None:
        xor_words(self.bound)


@dataclass(slots=True)
class OverwriteWords:
    tensors: tuple[int, ...]
    bound: Any
    keeps_old: bool

    def apply(self) -> None:
        if self.keeps_old:
            keep_old_words(self.bound)
        overwrite_words(self.bound)

    def revert(self) -> None:
        restore_old_words(self.bound)


@dataclass(slots=True)
class BlobSteps:
    tensors: tuple[int, ...]
    bound: Any

    def apply(self) -> None:
        sparse_apply(self.bound)

    def revert(self) -> None:
        sparse_revert(self.bound)


@dataclass(slots=True)
class PlaneSteps:
    tensors: tuple[int, ...]
    bound: Any
    is_step: bool

    def apply(self) -> None:
        (apply_step_planes if self.is_step else write_full_planes)(self.bound)

    def revert(self) -> None:
        if self.is_step:
            revert_step_planes(self.bound)


@dataclass(slots=True)
class MovedBytes:
    tensors: tuple[int, ...]
    bound: Any
    is_xor: bool

    def apply(self) -> None:
        (xor_segments if self.is_xor else copy_segments)(self.bound)

    def revert(self) -> None:
        if self.is_xor:
            xor_segments(self.bound)


def _parts(steps: Mapping[int, LoadedStep], kind: type[Any]) -> Iterator[tuple[int, Any]]:
    for tensor, step in steps.items():
        for part in step.parts:
            if isinstance(part, kind):
                yield tensor, part


def _changes(steps: Mapping[int, LoadedStep]) -> list[Change]:
    return [
        Change(
            source=tensor,
            positions=part.positions,
            words=part.words,
            old=part.old,
            first_element=part.first_element,
        )
        for tensor, part in _parts(steps, SparseWords)
    ]


def _bind_bytes(steps: Mapping[int, LoadedStep], target: _Target) -> Any:
    """Each plain window becomes a source of its own, and the table is cut to it."""
    tables, sources = [], []
    for number, (tensor, part) in enumerate(_parts(steps, PlainBytes)):
        tables.append(target.shifted(tensor, part.offset, part.offset + part.nbytes, number))
        sources.append(part.data)
    return bind_moves(SegmentTable.concat(tables), dst=target.buffers, src=sources)


def _bind_planes(steps: Mapping[int, LoadedStep], target: _Target) -> Any:
    tables, planes = [], []
    for number, (tensor, part) in enumerate(_parts(steps, PlaneWords)):
        end = part.offset + int(part.planes.data.nbytes)
        tables.append(target.shifted(tensor, part.offset, end, number))
        planes.append(part.planes)
    return bind_planes(SegmentTable.concat(tables), dst=target.buffers, planes=planes)


def held_by(table: SegmentTable) -> dict[int, Any]:
    """Tensor number to its segments, for those that have any."""
    order = np.argsort(table.rows["src"], kind="stable")
    rows = table.rows[order]
    numbers, first = np.unique(rows["src"], return_index=True)
    return dict(zip(numbers.tolist(), np.split(rows, first[1:]), strict=True)) if len(rows) else {}
