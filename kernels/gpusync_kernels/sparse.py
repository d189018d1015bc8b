"""GS01 blobs applied in place over a segment table, and undone, straight from the bytes as they were published.

Steps are not idempotent: applying a blob twice is wrong. It is undone by the same blob with the steps negated; only
literal streams need a record of the words they replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Buffer, Ints, address_of, byte_view, device_of, nbytes_of, sizes_of
from gpusync_kernels.gs01 import LITERAL, Blob, decode_stream
from gpusync_kernels.host import host_ops
from gpusync_kernels.host_numpy import step_of
from gpusync_kernels.moves import check_side
from gpusync_kernels.placed import UNSIGNED, element_rows, elements_of, locate
from gpusync_kernels.segments import Rows, SegmentTable, merge_rows
from gpusync_kernels.sparse_items import blocks_between, join_streams, step_columns, streams_of

BLOB_ALIGN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One tensor's blob: `data` its bytes, where the destinations are; `blob` its head, parsed on the host.

    `host`: the same bytes in host memory, if they are there: lets a rank skip blocks that lie outside its rows.
    """

    source: int
    data: Buffer
    blob: Blob
    host: Buffer | None = None


class BoundSparse:
    """Made by `bind_sparse`."""

    def __init__(
        self, table: SegmentTable, *, dst: Sequence[Buffer], payloads: Sequence[Payload], undo: Buffer | None
    ) -> None:
        self.device = device_of([*dst, *(p.data for p in payloads), *([] if undo is None else [undo])])
        self.dst, self.payloads, self.undo = tuple(dst), align_payloads(payloads, self.device), undo
        check_side(table.rows, "dst", sizes_of(self.dst))
        check_payloads(self.payloads)
        self.streams = streams_of([(p.source, p.blob) for p in self.payloads])
        self.undo_bytes = int(self.streams["literal_bytes"].sum())
        if undo is not None and nbytes_of(undo) < self.undo_bytes:
            raise ValueError(f"undo record has {nbytes_of(undo)} bytes, expected {self.undo_bytes}")
        self.segments = _segments_by_element(table.rows, self.payloads)
        self.stream_of, self.segment_of = join_streams(self.streams, self.segments)

    @cached_property
    def blocks(self) -> Ints:
        """Per pair of stream and segment, the index blocks [from, to) to decode; all if the index is out of reach."""
        pairs = zip(self.stream_of.tolist(), self.segment_of.tolist(), strict=True)
        return np.array([self._blocks(self.streams[i], self.segments[j]) for i, j in pairs], np.int64).reshape(-1, 2)

    def _blocks(self, stream: Any, segment: Any) -> tuple[int, int]:
        low = int(segment["src_offset"])
        high = low + (int(segment["rows"]) - 1) * int(segment["src_stride"]) + int(segment["row_bytes"])
        payload = self.payloads[stream["payload"]]
        host = payload.data if self.device is None else payload.host
        whole = low <= stream["base"] and high >= stream["base"] + stream["span"]
        if whole or host is None:
            return 0, int(stream["blocks"])
        index = byte_view(host)[stream["index_at"] : stream["unary_at"]].view("<u4")[::2]
        return blocks_between(stream, index, low, high)

    @cached_property
    def is_run(self) -> npt.NDArray[np.bool_]:
        """Per pair of stream and segment: steps, and a segment of one row."""
        is_step = self.streams["kind"][self.stream_of] != LITERAL
        run: npt.NDArray[np.bool_] = is_step & (self.segments["rows"][self.segment_of] == 1)
        return run

    @cached_property
    def runs(self) -> list[tuple[Any, Any, int, Ints]]:
        """Of such pairs, by payload and segment: the destination's words, the blob, its order, and its streams as
        `add_streams` takes them.
        """
        buffers = [byte_view(buffer) for buffer in self.dst]
        i, j = self.stream_of[self.is_run], self.segment_of[self.is_run]
        streams = self.streams[i]
        rows = step_columns(streams)
        rows[:, 0] -= self.segments["src_offset"][j]
        pair = streams["payload"] * max(1, len(self.segments)) + j
        order = np.argsort(pair, kind="stable")
        cuts = np.flatnonzero(np.diff(pair[order])) + 1
        found = []
        for these in np.split(order, cuts) if len(order) else []:
            payload, segment = self.payloads[streams["payload"][these[0]]], self.segments[j[these[0]]]
            words = elements_of(buffers, segment, payload.blob.element_bytes)[: segment["row_bytes"]]
            found.append((words, byte_view(payload.data), payload.blob.order, rows[these]))
        return found

    def placed(self) -> Iterator[tuple[Any, Any, Any, Ints, Any]]:
        """Per other pair: the stream, the destination's words, values, where they go, and ranks."""
        buffers = [byte_view(buffer) for buffer in self.dst]
        other = ~self.is_run
        for i, j in zip(self.stream_of[other], self.segment_of[other], strict=True):
            stream, segment = self.streams[i], self.segments[j]
            first, stop = self._blocks(stream, segment)
            payload = self.payloads[stream["payload"]]
            decoded = decode_stream(byte_view(payload.data), payload.blob, int(stream["number"]), first, stop)
            positions, values, rank = decoded
            element_bytes = payload.blob.element_bytes
            inside = positions < stream["base"] + stream["span"]
            held, index = locate(np.where(inside, positions, -1), segment, element_bytes)
            ranks = np.arange(rank, rank + len(positions))[held]
            yield stream, elements_of(buffers, segment, element_bytes), values[held], index, ranks

    def upload(self) -> None:
        """Makes the tables now, on the device where there is one: operations have nothing left to do but launch."""
        _ = self.runs if self.device is None else self.uploaded

    @cached_property
    def uploaded(self) -> tuple[Any, Any]:
        """`(apply, revert)`: lists of `(element width, table, programs' map)`."""
        from gpusync_kernels.device.sparse import upload_sparse

        return upload_sparse(self, revert=False), upload_sparse(self, revert=True)


def bind_sparse(
    table: SegmentTable, *, dst: Sequence[Buffer], payloads: Sequence[Payload], undo: Buffer | None = None
) -> BoundSparse:
    """`table`'s sources are tensors, its offsets bytes of them. `undo`, of `undo_bytes`, records what literals replace;
    without it a blob with literal streams cannot be reverted.
    """
    return BoundSparse(table, dst=dst, payloads=payloads, undo=undo)


def sparse_apply(bound: BoundSparse) -> None:
    """Adds every step and writes every literal word that the table's segments hold."""
    if bound.device is None:
        sparse_reference(bound, revert=False)
    else:
        from gpusync_kernels.device.sparse import launch_sparse

        launch_sparse(bound, revert=False)


def sparse_revert(bound: BoundSparse) -> None:
    """Undoes exactly one `sparse_apply` of the same binding."""
    if bound.undo_bytes > 0 and bound.undo is None:
        raise ValueError("literal streams were applied without an undo record")
    if bound.device is None:
        sparse_reference(bound, revert=True)
    else:
        from gpusync_kernels.device.sparse import launch_sparse

        launch_sparse(bound, revert=True)


def sparse_reference(bound: BoundSparse, *, revert: bool) -> None:
    add_steps, add_streams = host_ops().add_steps, host_ops().add_streams
    for words, data, order, streams in bound.runs:
        add_streams(words, data, streams, order=order, revert=revert)
    for stream, target, values, index, ranks in bound.placed():
        if stream["kind"] == LITERAL:
            _replace(bound, stream, target, index, ranks, revert=revert)
        else:
            steps = step_of(values, int(stream["magnitude"]), target.itemsize)
            add_steps(target, index, steps, order=int(stream["order"]), revert=revert)


def _replace(bound: BoundSparse, stream: Any, target: Any, index: Ints, ranks: Any, *, revert: bool) -> None:
    """Literal words in, old words recorded; or the recorded words back."""
    word, nbytes = UNSIGNED[int(stream["element_bytes"])], int(stream["count"] * stream["element_bytes"])
    record = None if bound.undo is None else byte_view(bound.undo)[stream["undo_at"] :][:nbytes].view(word)
    if not revert:
        data = byte_view(bound.payloads[stream["payload"]].data)
        if record is not None:
            record[ranks] = target[index]
        target[index] = data[stream["literal_at"] :][:nbytes].view(word)[ranks]
    elif record is not None:
        target[index] = record[ranks]


def _segments_by_element(rows: Rows, payloads: Sequence[Payload]) -> Rows:
    """The segments of the payloads' sources, in elements of each."""
    sizes = np.zeros(int(rows["src"].max(initial=0)) + 1, np.int64)
    for payload in payloads:
        if payload.source < len(sizes):
            sizes[payload.source] = payload.blob.element_bytes
    return element_rows(merge_rows(rows[sizes[rows["src"]] > 0]), sizes)


def align_payloads(payloads: Sequence[Payload], device: Any) -> tuple[Payload, ...]:
    """Blobs on a device begin at a multiple of 8, as kernels read them: those that do not are copied."""
    if device is None:
        return tuple(payloads)
    return tuple(p if address_of(p.data) % BLOB_ALIGN == 0 else replace(p, data=p.data.clone()) for p in payloads)


def check_payloads(payloads: Sequence[Payload]) -> None:
    for i, payload in enumerate(payloads):
        if nbytes_of(payload.data) != payload.blob.nbytes:
            raise ValueError(f"payload {i} has {nbytes_of(payload.data)} bytes, its head says {payload.blob.nbytes}")
