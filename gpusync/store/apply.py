"""Applying decoded steps to bytes, wherever a segment table says they lie: scratch in prepare, live params in commit.

The same calls serve both, and undo a commit. A *round* is the n-th delta of every tensor that has one; rounds follow
each other, and within a round each kind and word width is one call over all tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpusync.store.compact import CompactFile, Step, StepKind
from gpusync.store.memory import Memory
from gpusync_kernels import (
    Change,
    SegmentTable,
    bind_changes,
    bind_moves,
    copy_segments,
    keep_old_words,
    overwrite_words,
    restore_old_words,
    xor_segments,
    xor_words,
)

Buffer = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWords:
    """A sparse window on the device. `old` receives what an overwrite replaces."""

    first_element: int
    positions: Buffer
    words: Buffer
    old: Buffer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBytes:
    """A plain window on the device: bytes [offset, offset + nbytes) of the tensor."""

    offset: int
    nbytes: int
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStep:
    """A step whose arrays are where the params are."""

    kind: StepKind
    word_bytes: int
    sparse: Sequence[SparseWords]
    plain: Sequence[PlainBytes]


def load_step(step: Step, file: CompactFile, memory: Memory) -> LoadedStep:
    """Bring a step to the device. Room for the old words of an overwrite is taken now, so that a commit needs none."""
    sparse, plain = [], []
    for window in step.windows:
        words = memory.upload(file.words(step, window))
        if window.count is None:
            plain.append(PlainBytes(offset=window.offset, nbytes=window.nbytes, data=words))
            continue
        sparse.append(
            SparseWords(
                first_element=window.offset // step.word_bytes,
                positions=memory.upload(file.positions(window)),
                words=words,
                old=memory.zeros_like(words) if step.kind == "overwrite" else None,
            )
        )
    return LoadedStep(kind=step.kind, word_bytes=step.word_bytes, sparse=tuple(sparse), plain=tuple(plain))


class Steps:
    """The chain of every changed tensor: tensor number to its steps, oldest first."""

    def __init__(self, chains: Mapping[int, Sequence[LoadedStep]]) -> None:
        self._chains = dict(chains)

    @property
    def rounds(self) -> int:
        return max((len(chain) for chain in self._chains.values()), default=0)

    def apply(self, table: SegmentTable, buffers: Sequence[Buffer], *, keep_old: bool) -> None:
        """Bring the bytes of `table` (sources are tensor numbers, destinations `buffers`) to their new state.

        With `keep_old` everything that `revert` cannot recompute is kept on the way. Not idempotent.
        """
        for number in range(self.rounds):
            for kind, width, steps in self._round(number):
                _apply_sparse(kind, width, steps, table, buffers, keep_old=keep_old)
                _apply_plain(kind, steps, table, buffers)

    def revert(self, table: SegmentTable, buffers: Sequence[Buffer]) -> None:
        """Undo `apply(keep_old=True)` over the same table. Steps of kind "full" cannot be: their old bytes are not
        kept here."""
        for number in reversed(range(self.rounds)):
            for kind, width, steps in self._round(number):
                if kind == "overwrite":
                    restore_old_words(_bind(steps, table, buffers, width))
                else:
                    _apply_plain(kind, steps, table, buffers)
                    _apply_sparse(kind, width, steps, table, buffers, keep_old=False)

    def replaced(self, table: SegmentTable) -> SegmentTable:
        """The part of `table` that steps of kind "full" or plain overwrites write over, to be kept before a commit."""
        full = [tensor for tensor, chain in self._chains.items() if any(step.kind == "full" for step in chain)]
        return SegmentTable(table.rows[np.isin(table.rows["src"], full)])

    def _round(self, number: int) -> Iterator[tuple[StepKind, int, list[tuple[int, LoadedStep]]]]:
        groups: dict[tuple[StepKind, int], list[tuple[int, LoadedStep]]] = {}
        for tensor, chain in self._chains.items():
            if number < len(chain):
                step = chain[number]
                groups.setdefault((step.kind, step.word_bytes), []).append((tensor, step))
        for (kind, width), steps in groups.items():
            yield kind, width, steps


def _apply_sparse(
    kind: StepKind,
    width: int,
    steps: Sequence[tuple[int, LoadedStep]],
    table: SegmentTable,
    buffers: Sequence[Buffer],
    *,
    keep_old: bool,
) -> None:
    if not any(step.sparse for _, step in steps):
        return
    bound = _bind(steps, table, buffers, width)
    if kind == "xor":
        xor_words(bound)
        return
    if keep_old:
        keep_old_words(bound)
    overwrite_words(bound)


def _bind(steps: Sequence[tuple[int, LoadedStep]], table: SegmentTable, buffers: Sequence[Buffer], width: int) -> Any:
    changes = [
        Change(
            source=tensor,
            positions=window.positions,
            words=window.words,
            old=window.old,
            first_element=window.first_element,
        )
        for tensor, step in steps
        for window in step.sparse
    ]
    return bind_changes(table, dst=buffers, changes=changes, element_bytes=width)


def _apply_plain(
    kind: StepKind, steps: Sequence[tuple[int, LoadedStep]], table: SegmentTable, buffers: Sequence[Buffer]
) -> None:
    """One call over all plain windows: each becomes a source of its own, and the table is cut to it."""
    windows = [(tensor, window) for tensor, step in steps for window in step.plain]
    if not windows:
        return
    parts, sources = [], []
    for number, (tensor, window) in enumerate(windows):
        mine = SegmentTable(table.rows[table.rows["src"] == tensor])
        rows = mine.clipped(window.offset, window.offset + window.nbytes).rows.copy()
        rows["src"], rows["src_offset"] = number, rows["src_offset"] - window.offset
        parts.append(SegmentTable(rows))
        sources.append(window.data)
    moves = bind_moves(SegmentTable.concat(parts), dst=buffers, src=sources)
    (xor_segments if kind == "xor" else copy_segments)(moves)
