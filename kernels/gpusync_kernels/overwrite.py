"""Words at given positions, over a segment table: written, xored, and the old words kept and put back.

This is slime's overwrite encoding (words of one byte at u32 positions) and the compact form of every host-decoded delta
(words of the dtype's size at u32 positions inside a window). A rank changes what its segments hold and skips the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpusync_kernels.buffers import Buffer, Ints, address_of, addresses_of, byte_view, device_of, nbytes_of, sizes_of
from gpusync_kernels.host import host_ops
from gpusync_kernels.moves import check_side
from gpusync_kernels.placed import UNSIGNED, element_rows, elements_of, join_sources, locate
from gpusync_kernels.segments import SegmentTable, merge_rows
from gpusync_kernels.tiling import Launch, map_programs, tile_count

POSITION_BYTES = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New words for one source (or for a window of it; a source may have several).

    `positions`: unsigned 32- or 64-bit (in torch: the bits as int32 or int64), in elements from `first_element` on,
    unique, in any order. `words`: one word of the element size per position. `old`: as large as `words`; receives the
    words that stood there, where this rank holds them.
    """

    source: int
    positions: Buffer
    words: Buffer
    old: Buffer | None = None
    first_element: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A change and a segment that meet, in arrays of words. `first`: the position of the segment's first word; `target`
    begins there, and where the segment is one row it is that row."""

    positions: Any
    words: Any
    old: Any
    first_element: int
    segment: Any
    first: int
    target: Any


class BoundChanges:
    """Made by `bind_changes`."""

    def __init__(
        self, table: SegmentTable, *, dst: Sequence[Buffer], changes: Sequence[Change], element_bytes: int
    ) -> None:
        self.dst, self.changes, self.element_bytes = tuple(dst), tuple(changes), element_bytes
        self.position_bytes, self.counts = _check_changes(self.changes, element_bytes)
        buffers = [*self.dst]
        for change in self.changes:
            buffers += [change.positions, change.words] + ([] if change.old is None else [change.old])
        self.device = device_of(buffers)
        check_side(table.rows, "dst", sizes_of(self.dst))
        self.rows = element_rows(merge_rows(table.rows), element_bytes)
        self.change_of, self.segment_of = join_sources([change.source for change in self.changes], self.rows)

    @property
    def keeps_old(self) -> bool:
        return all(change.old is not None for change in self.changes)

    @cached_property
    def runs(self) -> list[_Pair]:
        """On the host, every change and every segment of one row that meet."""
        return list(self.pairs(of_runs=True))

    def pairs(self, *, of_runs: bool) -> Iterator[_Pair]:
        """Those of one row, or all others: a tensor that lies transposed has as many as columns, made as they come."""
        buffers, word = [byte_view(buffer) for buffer in self.dst], UNSIGNED[self.element_bytes]
        some = (self.rows["rows"][self.segment_of] == 1) == of_runs
        for i, j in zip(self.change_of[some].tolist(), self.segment_of[some].tolist(), strict=True):
            change, segment = self.changes[i], self.rows[j]
            target = elements_of(buffers, segment, self.element_bytes)
            yield _Pair(
                positions=byte_view(change.positions).view(UNSIGNED[self.position_bytes]),
                words=byte_view(change.words).view(word),
                old=None if change.old is None else byte_view(change.old).view(word),
                first_element=change.first_element,
                segment=segment,
                first=int(segment["src_offset"]) - change.first_element,
                target=target[: segment["row_bytes"]] if of_runs else target,
            )

    @cached_property
    def uploaded(self) -> tuple[Any, Any, Any]:
        """The launch's table, the same with old words in place of new ones, and the programs' map."""
        from gpusync_kernels.device.launch import upload, upload_launch

        launch = self._launch()
        restoring = launch.table.copy()
        restoring[:, 1] = restoring[:, 2]
        table, pieces = upload_launch(launch, self.device)
        return table, upload(restoring, self.device), pieces

    def upload(self) -> None:
        """Makes the tables now, on the device where there is one: operations have nothing left to do but launch."""
        _ = self.runs if self.device is None else self.uploaded

    def _launch(self) -> Launch:
        """columns: positions, words, old words, count, what to add to a position, destination, its stride, source
        stride, rows, elements per row, first program, bytes per position
        """
        i, rows = self.change_of, self.rows[self.segment_of]
        destination = addresses_of(self.dst)[rows["dst"]] + rows["dst_offset"]
        words, old = _addresses([c.words for c in self.changes]), _addresses([c.old for c in self.changes])
        positions = _addresses([c.positions for c in self.changes])
        for address in (destination, words[i], old[i]):
            if (address % self.element_bytes != 0).any():
                raise ValueError(f"words of {self.element_bytes} bytes lie at an address that is no multiple of it")
        if (positions % self.position_bytes != 0).any():
            raise ValueError(f"positions of {self.position_bytes} bytes lie at an address that is no multiple of it")
        first = np.array([change.first_element for change in self.changes], np.int64)
        first_program, piece_of_program = map_programs(tile_count(self.counts[i]))
        columns = (
            positions[i],
            words[i],
            old[i],
            self.counts[i],
            first[i] - rows["src_offset"],
            destination,
            rows["dst_stride"],
            rows["src_stride"],
            rows["rows"],
            rows["row_bytes"],
            first_program,
            np.full(len(i), self.position_bytes),
        )
        return Launch(np.stack(columns, axis=1), piece_of_program)


def bind_changes(
    table: SegmentTable, *, dst: Sequence[Buffer], changes: Sequence[Change], element_bytes: int = 1
) -> BoundChanges:
    """`table`'s sources are tensors, its offsets bytes of them. All changes have words of `element_bytes` bytes and
    positions of one width. Raises ValueError where sizes do not fit.
    """
    return BoundChanges(table, dst=dst, changes=changes, element_bytes=element_bytes)


def overwrite_words(bound: BoundChanges) -> None:
    """Writes the new words. Idempotent."""
    _run(bound, "write")


def xor_words(bound: BoundChanges) -> None:
    """Destination words become destination ^ word. Not idempotent: applying twice restores the old words."""
    _run(bound, "xor")


def keep_old_words(bound: BoundChanges) -> None:
    """Gathers what stands at the positions into each change's `old`; what this rank does not hold stays as it is."""
    _require_old(bound)
    _run(bound, "keep")


def restore_old_words(bound: BoundChanges) -> None:
    """Writes each change's `old` back: undoes `overwrite_words` after `keep_old_words`."""
    _require_old(bound)
    _run(bound, "restore")


def _run(bound: BoundChanges, mode: str) -> None:
    if bound.device is None:
        changes_reference(bound, mode)
    else:
        from gpusync_kernels.device.overwrite import launch_changes

        launch_changes(bound, mode)


def changes_reference(bound: BoundChanges, mode: str) -> None:
    change_words = host_ops().change_words
    for run in bound.runs:
        if mode in ("write", "xor"):
            change_words(run.target, run.positions, run.words, first=run.first, is_xor=mode == "xor")
        else:
            _change(run, mode, bound.element_bytes)
    for pair in bound.pairs(of_runs=False):
        _change(pair, mode, bound.element_bytes)


def _change(pair: _Pair, mode: str, element_bytes: int) -> None:
    held, index = locate(pair.positions.astype(np.int64) + pair.first_element, pair.segment, element_bytes)
    if mode == "keep":
        pair.old[held] = pair.target[index]
    elif mode == "xor":
        pair.target[index] ^= pair.words[held]
    else:
        pair.target[index] = (pair.words if mode == "write" else pair.old)[held]


def _check_changes(changes: Sequence[Change], element_bytes: int) -> tuple[int, Ints]:
    """`(bytes per position, positions of each change)`."""
    if element_bytes not in UNSIGNED:
        raise ValueError(f"words of {element_bytes} bytes, expected 1, 2, 4 or 8")
    widths = {change.positions.dtype.itemsize for change in changes} or {POSITION_BYTES[0]}
    if len(widths) != 1 or not widths <= set(POSITION_BYTES):
        raise ValueError(f"positions of {sorted(widths)} bytes, expected all of 4 or all of 8")
    width = widths.pop()
    counts = np.array([nbytes_of(change.positions) // width for change in changes], np.int64)
    for i, change in enumerate(changes):
        for name, buffer in (("words", change.words), ("old", change.old)):
            if buffer is not None and nbytes_of(buffer) != counts[i] * element_bytes:
                raise ValueError(
                    f"change {i} has {nbytes_of(buffer)} bytes of {name}, expected {counts[i]} times {element_bytes}"
                )
    return width, counts


def _addresses(buffers: Sequence[Buffer | None]) -> Ints:
    return np.array([0 if buffer is None else address_of(buffer) for buffer in buffers], np.int64)


def _require_old(bound: BoundChanges) -> None:
    if not bound.keeps_old:
        raise ValueError("a change was bound without a buffer for old words")
