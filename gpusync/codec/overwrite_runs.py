"""The changes of an overwrite payload as runs with strictly ascending positions, in bounded memory.

Positions and values lie apart in the frame, and a frame can be read only from its front. Three ways, by size and order:

- held: a small payload is decoded whole, and sorted if it must be;
- streamed: positions ascend, so two readers of the same frame walk side by side, one at the positions, one at the
  values (a scan over the positions comes first: a descent found half way would be too late for windows already done);
- grouped: positions in any order; the frame is read again for each group of positions that fits in memory.

Whatever the way, every position is checked against the tensor's size and a duplicate is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpusync.codec.frames import FrameReader
from gpusync.codec.payload import U8, Payload
from gpusync.errors import PayloadError, UnsupportedFormatError, Where

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Run = tuple[U32, U8]

HELD_BYTES = 4 << 20
GROUP_CHANGES = 2 << 20
# Each pass reads the whole frame again: without a bound, a hostile order would keep a reader busy for days.
MAX_PASSES = 64
_CHUNK = 64 << 10
_MAX_BINS = 4096


def open_runs(
    payload: Payload,
    *,
    count: int,
    nbytes: int,
    where: Where,
    held_bytes: int = HELD_BYTES,
    group_changes: int = GROUP_CHANGES,
) -> Iterator[Run]:
    """Yields (positions, values), ascending within a run and from run to run. Lazy: reads at the first step.

    Memory: positions that ascend, 20 MiB at most; any order, some 30 bytes for each of `group_changes`. Raises
    `PayloadError` for a damaged payload, a position twice or past the end, `UnsupportedFormatError` for one that would
    need more than `MAX_PASSES` passes.
    """
    frame = _Frame(payload, count=count, nbytes=nbytes, where=where)
    if 5 * count <= held_bytes:
        yield from frame.held_run()
    elif frame.is_ascending():
        yield from frame.streamed_runs()
    else:
        yield from frame.grouped_runs(group_changes)


class _Frame:
    """One payload with the count its frame declares; may be read several times."""

    def __init__(self, payload: Payload, *, count: int, nbytes: int, where: Where) -> None:
        self.payload = payload
        self.count = count
        self.nbytes = nbytes
        self.where = where

    def held_run(self) -> Iterator[Run]:
        reader = self._reader()
        positions, values = np.empty(self.count, np.uint32), np.empty(self.count, np.uint8)
        self._read_positions(reader, positions)
        reader.read_into(values)
        reader.finish()
        if self.count:
            yield (positions, values) if _ascends(positions) else self._sorted(_keys(positions) | values)

    def is_ascending(self) -> bool:
        last = -1
        for _, positions in self._position_chunks(self._reader()):
            if int(positions[0]) <= last or not _ascends(positions):
                return False
            last = int(positions[-1])
        return True

    def streamed_runs(self) -> Iterator[Run]:
        values_reader = self._reader()
        values_reader.skip(4 * self.count)
        last = -1
        for _, positions in self._position_chunks(self._reader()):
            # Checked again: the file may not be what it was when it was scanned.
            if int(positions[0]) <= last or not _ascends(positions):
                raise self._changed()
            last = int(positions[-1])
            values = np.empty(len(positions), np.uint8)
            values_reader.read_into(values)
            yield positions, values
        values_reader.finish()

    def grouped_runs(self, group_changes: int) -> Iterator[Run]:
        shift = max(0, (self.nbytes - 1).bit_length() - (_MAX_BINS.bit_length() - 1))
        bins = np.zeros((self.nbytes - 1 >> shift) + 1, np.int64)
        for _, positions in self._position_chunks(self._reader()):
            bins += np.bincount(positions >> np.uint32(shift), minlength=len(bins))
        if int(bins.max()) > 1 << shift:
            raise self._duplicate(None)
        groups = _group_bins(bins, group_changes)
        if len(groups) > MAX_PASSES:
            raise UnsupportedFormatError(
                "overwrite payload of this size must have ascending positions", where=self.where,
                expected=f"at most {MAX_PASSES * group_changes} changes in any order", found=self.count,
            )  # fmt: skip
        for first, last, size in groups:
            yield self._sorted(self._group(first << shift, last + 1 << shift, size))

    def _group(self, start: int, stop: int, size: int) -> U64:
        """position << 8 | value of the changes in [start, stop), in payload order."""
        reader = self._reader()
        keys, ordinals, found = np.empty(size, np.uint64), np.empty(size, np.int64), 0
        for at, positions in self._position_chunks(reader):
            inside = np.flatnonzero((positions >= start) & (positions < stop))
            if found + len(inside) > size:
                raise self._changed()
            keys[found : found + len(inside)] = _keys(positions[inside])
            ordinals[found : found + len(inside)] = inside + at
            found += len(inside)
        if found != size:
            raise self._changed()
        for at in range(0, self.count, _CHUNK):
            values = np.empty(min(_CHUNK, self.count - at), np.uint8)
            reader.read_into(values)
            low, high = np.searchsorted(ordinals, [at, at + len(values)])
            keys[low:high] |= values[ordinals[low:high] - at]
        reader.finish()
        return keys

    def _reader(self) -> FrameReader:
        """A reader behind the count, which is checked."""
        reader = FrameReader(self.payload, content_size=4 + 5 * self.count, where=self.where)
        stored = np.empty(4, np.uint8)
        reader.read_into(stored)
        found = int.from_bytes(stored.tobytes(), "little")
        if found != self.count:
            raise PayloadError(
                "overwrite payload's count disagrees with its size", where=self.where, expected=self.count, found=found
            )
        return reader

    def _position_chunks(self, reader: FrameReader) -> Iterator[tuple[int, U32]]:
        """(ordinal of the first, positions), each chunk in fresh memory."""
        for at in range(0, self.count, _CHUNK):
            positions = np.empty(min(_CHUNK, self.count - at), np.uint32)
            self._read_positions(reader, positions)
            yield at, positions

    def _read_positions(self, reader: FrameReader, positions: U32) -> None:
        reader.read_into(positions.view(np.uint8))
        if len(positions) and int(positions.max()) >= self.nbytes:
            raise PayloadError(
                "overwrite position past the tensor's end", where=self.where, expected=f"below {self.nbytes}",
                found=int(positions.max()),
            )  # fmt: skip

    def _sorted(self, keys: U64) -> Run:
        keys.sort()
        positions = (keys >> np.uint64(8)).astype(np.uint32)
        twice = np.flatnonzero(positions[1:] == positions[:-1])
        if len(twice):
            raise self._duplicate(int(positions[twice[0]]))
        return positions, keys.astype(np.uint8)

    def _duplicate(self, position: int | None) -> PayloadError:
        found = "more changes than bytes" if position is None else f"position {position} twice"
        return PayloadError("overwrite payload names a position twice", where=self.where, found=found)

    def _changed(self) -> PayloadError:
        return PayloadError("payload changed while it was read", where=self.where)


def _ascends(positions: U32) -> bool:
    return bool((positions[1:] > positions[:-1]).all())


def _keys(positions: U32) -> U64:
    return positions.astype(np.uint64) << np.uint64(8)


def _group_bins(bins: npt.NDArray[np.int64], limit: int) -> list[tuple[int, int, int]]:
    """(first bin, last bin, changes) of consecutive bins with at most `limit` changes, or of one bin with more."""
    groups: list[tuple[int, int, int]] = []
    first, size = 0, 0
    for index, count in enumerate(bins.tolist()):
        if size and size + count > limit:
            groups.append((first, index - 1, size))
            first, size = index, 0
        size += count
    if size:
        groups.append((first, len(bins) - 1, size))
    return groups
