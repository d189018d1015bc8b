"""Bytes that several ranks have parts of, put together by one: words cut by a boundary, last stripes, whole tensors.

Every rank knows from the ownership which fragments everyone sends, and in what order; only the bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.digest.exchange import Bytes
from gpusync.digest.intervals import Ints, singles_of
from gpusync.digest.supply import Source
from gpusync_kernels.buffers import Buffer
from gpusync_kernels.copy import copy_segments
from gpusync_kernels.moves import Moves
from gpusync_kernels.segments import Rows, SegmentTable, deal_rows, split_rows
from gpusync_kernels.xxh3 import BLOCK_BYTES, WORD_BYTES


@dataclass(frozen=True, slots=True)
class Fragments:
    """One rank's fragments, singles in the order in which they travel.

    Fragment i goes to rank `receiver[i]`, which puts it at `rows["src_offset"][i]` of what it assembles.
    """

    rows: Rows
    receiver: Ints

    @classmethod
    def of(cls, rows: Rows, receiver: Ints) -> Fragments:
        order = np.lexsort((rows["src_offset"], receiver))
        return cls(rows[order], receiver[order])

    def sizes(self, ranks: int) -> list[int]:
        """Bytes to each rank."""
        sizes: list[int] = np.bincount(self.receiver, self.rows["row_bytes"], minlength=ranks).astype(int).tolist()
        return sizes

    @property
    def nbytes(self) -> int:
        return int(self.rows["row_bytes"].sum())

    def in_payload(self) -> Rows:
        """The fragments as they travel: source positions count through all that this rank sends."""
        rows = self.rows.copy()
        rows["src"], rows["src_offset"] = 0, np.cumsum(rows["row_bytes"]) - rows["row_bytes"]
        return rows

    def split(self, payload: Bytes, ranks: int) -> list[Bytes]:
        """The bytes for each rank."""
        return np.split(payload, np.cumsum(self.sizes(ranks))[:-1])

    def gather(self, source: Source, ranks: int) -> list[Bytes]:
        """The bytes for each rank, from where this rank has them."""
        rows, start = self.in_payload(), source.positions(self.rows)
        shift = rows["src_offset"] - start
        # asked for one after another, each by its position: what is too large is cut where its tensor may be
        rows["src"], rows["src_offset"] = np.arange(len(rows)), start
        target = zeros_on(source.device, self.nbytes)
        for window in source.windows(rows):
            found = window.rows.copy()
            found["src_offset"] += shift[found["src"]]
            copy_to_source(found, target, window.buffers)
        return self.split(on_host(target), ranks)

    def scatter(self, payload: Bytes, rank: int, assembly: Bytes) -> None:
        """What came from the rank whose fragments these are to `rank`, to its place."""
        rows = self.rows[self.receiver == rank]
        rows["dst"], rows["dst_stride"] = 0, rows["row_bytes"]
        rows["dst_offset"] = np.cumsum(rows["row_bytes"]) - rows["row_bytes"]
        copy_to_source(rows, assembly, [payload])


def cut_words(rows: Rows) -> Rows:
    """The parts of `rows` that are less than a word of their tensor: singles, `src` kept.

    Bytes 3..20 of a tensor: 3..7 and 16..20.
    """
    if not len(rows):
        return rows
    first, _, last = split_rows(deal_rows(rows, WORD_BYTES), WORD_BYTES, "src")
    return singles_of(np.concatenate([first, last]))


def read_bytes(rows: Rows, source: Source, nbytes: int) -> Bytes:
    """A host buffer that has what `rows` hold at their source positions, zeros elsewhere."""
    target = zeros_on(source.device, nbytes)
    for window in source.windows(rows):
        copy_to_source(window.rows, target, window.buffers)
    return on_host(target)


def zeros_on(device: Any, nbytes: int) -> Any:
    """A buffer on a device, None for the host, to copy to."""
    if device is None:
        return np.zeros(nbytes, np.uint8)
    from gpusync_kernels.device.launch import zeros

    return zeros((nbytes,), device, np.uint8)


def on_host(buffer: Any) -> Bytes:
    host: Bytes = buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
    return host


def copy_to_source(rows: Rows, target: Buffer, buffers: Sequence[Buffer]) -> None:
    """Rows from where they lie (their destination side, in `buffers`) to their source position in `target`."""
    rows = rows.copy()
    rows["src"] = 0
    copy_segments(Moves(SegmentTable(rows).swapped(), dst=[target], src=buffers))


@dataclass(frozen=True, slots=True)
class ByteBatch:
    """Windows [first, stop) of some tensors; only one too large for one batch is cut, at multiples of 1,024 bytes."""

    tensors: Ints
    first: Ints
    stop: Ints


def byte_batches(tensors: Ints, nbytes: Ints, cost: npt.NDArray[np.float64], budget_bytes: int) -> Iterator[ByteBatch]:
    """All bytes of `tensors`, in order, in batches of about `budget_bytes`, when a byte of tensor t costs `cost[t]`."""
    batch: list[tuple[int, int, int]] = []
    used = 0.0
    for tensor in tensors.tolist():
        size, price = int(nbytes[tensor]), float(cost[tensor])
        step = max(1, int(budget_bytes / price / BLOCK_BYTES)) * BLOCK_BYTES
        for first in range(0, max(size, 1), step):
            window = (tensor, first, min(first + step, size))
            worth = price * (window[2] - first)
            if batch and (used + worth > budget_bytes or batch[-1][0] == tensor):
                yield _byte_batch(batch)
                batch, used = [], 0.0
            batch.append(window)
            used += worth
    if batch:
        yield _byte_batch(batch)


def _byte_batch(windows: list[tuple[int, int, int]]) -> ByteBatch:
    tensors, first, stop = np.array(windows, np.int64).T
    return ByteBatch(tensors, first, stop)
