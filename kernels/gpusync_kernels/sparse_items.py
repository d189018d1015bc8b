"""The streams of many GS01 blobs in one list, and their launches, one per element width. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Ints
from gpusync_kernels.gs01 import DESCRIPTOR, LITERAL, Blob, padded_literals
from gpusync_kernels.host_numpy import BLOCK_BITS
from gpusync_kernels.placed import join_sources
from gpusync_kernels.segments import Rows
from gpusync_kernels.tiling import Launch, map_programs

STREAM = np.dtype(
    [
        (name, "<i8")
        for name in (
            "payload",
            "number",
            "source",
            "element_bytes",
            "order",
            "base",
            "span",
            "blocks",
            "count",
            "nbits",
            "k",
            "v",
            "magnitude",
            "kind",
            "literal_at",
            "index_at",
            "unary_at",
            "fields_at",
            "literal_bytes",
            "undo_at",
        )
    ]
)


def streams_of(blobs: Sequence[tuple[int, Blob]]) -> npt.NDArray[Any]:
    """All streams of `(source, blob)` pairs as one array of STREAM.

    `base`, `span`: the stream's part of the tensor, in elements. `*_at` are offsets in the blob; `undo_at` is where the
    old words of a literal stream go in the record of all of them.
    """
    counts = np.array([len(blob.streams) for _, blob in blobs], np.int64)
    rows = np.zeros(int(counts.sum()), STREAM)
    if not len(rows):
        return rows
    heads = np.concatenate([blob.streams for _, blob in blobs], dtype=DESCRIPTOR)
    rows["payload"] = np.repeat(np.arange(len(blobs)), counts)
    rows["number"] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows["source"] = np.repeat([source for source, _ in blobs], counts)
    rows["element_bytes"] = np.repeat([blob.element_bytes for _, blob in blobs], counts)
    rows["order"] = np.repeat([blob.order for _, blob in blobs], counts)
    for name in ("count", "nbits", "k", "v", "kind"):
        rows[name] = heads[name]
    rows["magnitude"] = np.left_shift(1, heads["g"].astype(np.int64))
    rows["base"] = np.concatenate([blob.base for _, blob in blobs])
    rows["span"] = np.concatenate([blob.span for _, blob in blobs])
    rows["blocks"] = -(-rows["nbits"] // BLOCK_BITS)
    rows["literal_bytes"] = padded_literals(rows, rows["element_bytes"])
    offsets = np.concatenate([blob.offsets for _, blob in blobs])
    for column, name in enumerate(("literal_at", "index_at", "unary_at", "fields_at")):
        rows[name] = offsets[:, column]
    rows["undo_at"] = np.cumsum(rows["literal_bytes"]) - rows["literal_bytes"]
    return rows


def step_columns(streams: npt.NDArray[Any]) -> Ints:
    """Streams of steps as `add_streams` takes them, for words that are the tensor from its first element on."""
    names = ("base", "span", "count", "nbits", "k", "v", "magnitude", "index_at", "unary_at", "fields_at")
    return np.stack([streams[name] for name in names], 1)


def join_streams(streams: npt.NDArray[Any], segments: Rows) -> tuple[Ints, Ints]:
    """All pairs (stream, segment) of one source whose elements can meet."""
    i, j = join_sources(streams["source"], segments)
    stop = segments["src_offset"] + (segments["rows"] - 1) * segments["src_stride"] + segments["row_bytes"]
    meet = (streams["base"][i] < stop[j]) & (streams["base"][i] + streams["span"][i] > segments["src_offset"][j])
    return i[meet], j[meet]


def blocks_between(stream: Any, index: npt.NDArray[np.uint32], low: int, high: int) -> tuple[int, int]:
    """The blocks of a stream that can hold elements [low, high) of the tensor: a binary search on the index."""
    base = int(stream["base"])
    first = int(np.searchsorted(index, max(low - base, 0), "right")) - 1
    stop = int(np.searchsorted(index, max(high - base, 0), "left"))
    return max(first, 0), max(stop, first, 0)


def sparse_launch(
    streams: npt.NDArray[Any], segments: Rows, *, blocks: Ints, data: Ints, dst: Ints, undo: int, revert: bool
) -> Launch:
    """The launch over pairs of a stream and a segment, all of one element width. Row i of each argument is pair i:
    `blocks` int64 [pairs, 2] from and to, `data` the blob's address, `dst` the address of the segment's first element.

    columns: 0 destination, 1 its stride, 2 what to add to a position, 3 source stride, 4 rows, 5 elements per row, 6
    index, 7 unary, 8 fields, 9 words that literals write or 0, 10 record of old words or 0, 11 bits, 12 count, 13
    span, 14 k, 15 v, 16 least magnitude, 17 order, 18 first program, 19 first block, 20 sign of the steps
    """
    first_program, piece_of_program = map_programs(blocks[:, 1] - blocks[:, 0])
    # whole rows between the segment's first element and the stream's part are skipped here, in 64 bits
    ahead = streams["base"] - segments["src_offset"]
    stride = segments["src_stride"]
    skipped = np.where((segments["rows"] > 1) & (ahead > 0), ahead // np.maximum(stride, 1), 0)
    literal = streams["kind"] == LITERAL
    record = np.where(literal & (undo != 0), undo + streams["undo_at"], 0)
    written = np.where(literal, record if revert else data + streams["literal_at"], 0)
    columns = (
        dst + skipped * segments["dst_stride"],
        segments["dst_stride"],
        ahead - skipped * stride,
        stride,
        segments["rows"] - skipped,
        segments["row_bytes"],
        data + streams["index_at"],
        data + streams["unary_at"],
        data + streams["fields_at"],
        written,
        np.zeros_like(record) if revert else record,
        *(streams[name] for name in ("nbits", "count", "span", "k", "v", "magnitude", "order")),
        first_program,
        blocks[:, 0],
        np.full(len(streams), -1 if revert else 1),
    )
    return Launch(np.stack(columns, axis=1), piece_of_program)
