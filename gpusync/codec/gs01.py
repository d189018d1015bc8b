"""Decodes GS01 payloads, sparse steps, on the host. The layout is drawn in `gpusync_kernels.gs01`.

Streams are decoded in step with the windows, those of one part of the tensor side by side, in bounded chunks; every
check of the format is made on the way, before the window that it concerns is changed. Compiled loops find it faster to
check a blob in memory as a whole, and then to add what its index says lies in a window, where there are several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.codec.gs01_stream import Ints, StreamReader
from gpusync.codec.payload import U8, HeldPayload, Payload, as_bytes, read_head
from gpusync.codec.windows import WINDOW_BYTES, WindowOrder, pieces
from gpusync.errors import NOWHERE, PayloadError, Where
from gpusync_kernels.gs01 import (
    END_BYTES,
    HEAD,
    LITERAL,
    MAGIC,
    MAX_STREAMS_OF_PART,
    Blob,
    decode_stream,
    head_bytes,
    parse_blob,
)
from gpusync_kernels.host import host_ops
from gpusync_kernels.sparse_items import blocks_between, step_columns, streams_of

GS01_MAGIC = MAGIC
# Parts of an encoder of ours are not larger; what others make is checked window by window, which takes longer.
MARKED_PART_LOG2 = 24
# Of a tensor in one window, a check of its own takes longer than it saves.
CHECKED_ABOVE_BYTES = WINDOW_BYTES

_NOWHERE: Ints = np.empty(0, np.int64)


class Gs01Decoder:
    """Adds steps to old words and replaces words by literals, window by window. Windows hold whole elements.

    `blob` is the parsed head, checked against the tensor and the payload's length; `payload` what it was read from.
    Streams are checked at least as far as windows have come; `check` goes through all of them without a tensor.
    """

    needs_base = True

    def __init__(self, payload: Payload, *, nbytes: int, element_bytes: int, where: Where = NOWHERE) -> None:
        self.payload = payload
        self.blob = _read_blob(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
        self.unit_bytes = element_bytes
        self._order = WindowOrder(nbytes=nbytes, unit_bytes=element_bytes, where=where)
        self._where = where
        self._streams: _Walk | _CheckedBlob | None = None

    def apply(self, window: U8, offset: int) -> None:
        self._order.advance(window, offset)
        if self._streams is None:
            self._streams = self._open()
        for piece, start in pieces(window, offset):
            self._streams.apply(piece.view(f"<u{self.unit_bytes}"), start // self.unit_bytes)

    def finish(self) -> None:
        self._order.finish()

    def check(self) -> None:
        """Every check there is, on all streams; independent of the windows. Raises `PayloadError`.

        Whoever applies the blob by other means than `apply` calls it first, on bytes that cannot change meanwhile.
        """
        if self.blob.part_log2 > MARKED_PART_LOG2:
            walk, step = _Walk(self.payload, self.blob, self._where), WINDOW_BYTES // self.unit_bytes
            for first in range(0, self.blob.elements, step):
                walk.changes(first, min(step, self.blob.elements - first))
            return
        if self._are_sound():
            return
        marks = np.zeros(0, np.uint8)  # a bit for each element of one part
        part = -1
        for number in _by_part(self.blob).tolist():
            reader = StreamReader(self.payload, self.blob, number, where=self._where)
            if reader.part != part:
                part, marks = reader.part, np.zeros(-(-reader.span // 8), np.uint8)
            reader.check(marks)

    def _are_sound(self) -> bool:
        """Whether compiled loops find nothing wrong; not where there are none, or what is wrong has to be named."""
        are_sound, payload, blob = host_ops().are_sound, self.payload, self.blob
        if are_sound is None or not isinstance(payload, HeldPayload):
            return False
        return are_sound(np.frombuffer(payload.data.toreadonly(), np.uint8), blob)

    def _open(self) -> _Walk | _CheckedBlob:
        payload, blob = self.payload, self.blob
        pays = host_ops().is_compiled and blob.elements * blob.element_bytes > CHECKED_ABOVE_BYTES
        if pays and isinstance(payload, HeldPayload) and blob.part_log2 <= MARKED_PART_LOG2:
            self.check()
            return _CheckedBlob(np.frombuffer(payload.data.toreadonly(), np.uint8), blob)
        return _Walk(payload, blob, self._where)


class _CheckedBlob:
    """A blob in memory that `check` has gone through."""

    def __init__(self, data: U8, blob: Blob) -> None:
        self._data, self._blob = data, blob
        streams = streams_of([(0, blob)])
        streams = streams[np.argsort(streams["base"], kind="stable")]
        is_literal = streams["kind"] == LITERAL
        self._literals, self._steps = streams[is_literal], streams[~is_literal]
        self._columns = step_columns(self._steps)

    def apply(self, words: npt.NDArray[Any], first: int) -> None:
        """Changes the elements of the tensor from `first` on, as many as there are words."""
        stop = first + len(words)
        columns = self._columns[_reaching(self._steps, first, stop)].copy()
        columns[:, 0] -= first
        host_ops().add_streams(words, self._data, columns, order=self._blob.order, revert=False)
        for stream in self._literals[_reaching(self._literals, first, stop)]:
            index = self._data[stream["index_at"] : stream["unary_at"]].view("<u4")[::2]
            blocks = blocks_between(stream, index, first, stop)
            positions, _, rank = decode_stream(self._data, self._blob, int(stream["number"]), *blocks)
            low, high = np.searchsorted(positions, [first, stop])
            literals = self._data[stream["literal_at"] :][: stream["count"] * words.itemsize].view(words.dtype)
            words[positions[low:high] - first] = literals[rank + low : rank + high]


def _reaching(streams: npt.NDArray[Any], first: int, stop: int) -> slice:
    """Those whose part has some of the elements [first, stop). They are sorted by part."""
    ends = streams["base"] + streams["span"]
    return slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(streams["base"], stop)))


@dataclass(frozen=True, slots=True)
class _Changes:
    """Of a range of elements, from whose first indices count: where steps go, the steps, and `(index, words)`."""

    index: Ints
    steps: npt.NDArray[Any]
    literals: list[tuple[Ints, npt.NDArray[Any]]]


class _Walk:
    """All streams together, part by part."""

    def __init__(self, payload: Payload, blob: Blob, where: Where) -> None:
        self._payload, self._blob, self._where = payload, blob, where
        self._by_part = _by_part(blob)
        self._bases = blob.base[self._by_part]
        self._opened = 0
        self._readers: list[StreamReader] = []
        self._none = np.empty(0, f"<i{blob.element_bytes}")
        self._marks: npt.NDArray[np.uint32] = np.empty(0, np.uint32)

    def apply(self, words: npt.NDArray[Any], first: int) -> None:
        """Changes the elements of the tensor from `first` on, as many as there are words."""
        changes = self.changes(first, len(words))
        host_ops().add_steps(words, changes.index, changes.steps, order=self._blob.order, revert=False)
        for index, literals in changes.literals:
            words[index] = literals

    def changes(self, first: int, count: int) -> _Changes:
        """Those of elements [first, first + count). Ranges come ascending and gapless.

        An element that two streams change is an error.
        """
        stop = first + count
        while self._opened < len(self._bases) and self._bases[self._opened] < stop:
            number = int(self._by_part[self._opened])
            self._readers.append(StreamReader(self._payload, self._blob, number, where=self._where))
            self._opened += 1
        index, steps, literals = [_NOWHERE], [self._none], []
        for reader in self._readers:
            for positions, values in reader.take(stop):
                if reader.is_literal:
                    literals.append((positions - first, values))
                else:
                    index.append(positions)
                    steps.append(values)
        merged = np.concatenate(index)
        merged -= first
        if len(self._readers) > 1:
            self._check_different(np.concatenate([merged, *(each for each, _ in literals)]), count)
        self._readers = [reader for reader in self._readers if reader.base + reader.span > stop]
        return _Changes(merged, np.concatenate(steps), literals)

    def _check_different(self, index: Ints, count: int) -> None:
        """Every change leaves its number where it goes, and must find it there again."""
        if len(self._marks) < count:
            self._marks = np.empty(count, np.uint32)
        numbers = np.arange(len(index), dtype=np.uint32)
        self._marks[index] = numbers
        if not np.array_equal(self._marks.take(index), numbers):
            raise PayloadError("GS01 streams change an element twice", where=self._where)


def _by_part(blob: Blob) -> Ints:
    """The numbers of its streams, part by part."""
    return np.argsort(blob.streams["part"], kind="stable")


def _read_blob(payload: Payload, *, nbytes: int, element_bytes: int, where: Where) -> Blob:
    """The head, for a tensor of `nbytes` bytes; nothing is allocated for more streams than the tensor can have."""
    start = read_head(payload, HEAD.size)
    if len(start) < HEAD.size:
        raise PayloadError("GS01 header is cut", where=where, expected=HEAD.size, found=len(start))
    _, found, _, part_log2, _, elements, streams, _ = HEAD.unpack(start)
    if found != element_bytes:
        raise PayloadError("GS01 payload with a wrong element size", where=where, expected=element_bytes, found=found)
    if elements * element_bytes != nbytes:
        raise PayloadError(
            "GS01 payload of another tensor", where=where, expected=f"{nbytes} bytes", found=elements * element_bytes
        )
    most = MAX_STREAMS_OF_PART * -(-elements >> part_log2) if part_log2 < 64 else 0
    if streams > most or head_bytes(start) > payload.nbytes:
        raise PayloadError("GS01 payload with a wrong number of streams", where=where, found=streams)
    try:
        blob = parse_blob(read_head(payload, head_bytes(start)), payload.nbytes)
    except ValueError as error:
        raise PayloadError(str(error), where=where) from error
    end = np.empty(END_BYTES, np.uint8)
    payload.read_into(payload.nbytes - END_BYTES, as_bytes(end))
    if end.any():
        raise PayloadError("GS01 padding is not zero", where=where)
    return blob
