"""GS01, the sparse-step payload: what a blob's head says, and the reference decoder of its streams. Pure numpy.

    head 24 bytes | S descriptors of 16 | per stream: literals, index, unary, fields, padded to 8 | 8 zero bytes

A stream is a list of changes: ascending positions, each with a step (or, in a literal stream, a new word). Position
gaps are Rice-coded: the high part as zero bits before a one in `unary`, the low k bits in `fields`, where v bits of
step follow. `index` has (position, rank) at every 1,024th unary bit, so that blocks of unary bits decode
independently.

`parse_blob` checks what is needed to stay inside the blob; the decoders trust its bits as far as that allows. A damaged
blob decodes to other changes, never to an access outside.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Bytes, Ints
from gpusync_kernels.host import host_ops
from gpusync_kernels.host_numpy import BLOCK_BITS

ByteString: TypeAlias = bytes | bytearray | memoryview | Bytes

MAGIC = b"GS01"
HEAD = struct.Struct("<4sBBBBQII")
DESCRIPTOR = np.dtype(
    [("count", "<u4"), ("nbits", "<u4"), ("part", "<u4"), ("g", "u1"), ("k", "u1"), ("v", "u1"), ("kind", "u1")]
)
LITERAL = 1
END_BYTES = 8
# More than any encoder needs: a stream per class of steps, and one of literals.
MAX_STREAMS_OF_PART = 64


@dataclass(frozen=True, slots=True)
class Blob:
    """A parsed head. Per stream `base` is the element that its positions count from, `span` how many elements its part
    has; `offsets`, int64 [streams, 5]: where literals, index, unary and fields begin; the end.
    """

    element_bytes: int
    order: int
    part_log2: int
    elements: int
    streams: npt.NDArray[Any]
    base: Ints
    span: Ints
    offsets: Ints
    nbytes: int

    @property
    def blocks(self) -> Ints:
        """Per stream, how many index blocks it has."""
        return -(-self.streams["nbits"].astype(np.int64) // BLOCK_BITS)

    @property
    def literal_bytes(self) -> Ints:
        """Per stream, the bytes of its literal words, padded to 8; 0 for a step stream."""
        return padded_literals(self.streams, self.element_bytes)


def head_bytes(start: ByteString) -> int:
    """How many bytes from the blob's first on `parse_blob` needs, told from the first 24."""
    return HEAD.size + DESCRIPTOR.itemsize * int(HEAD.unpack(bytes(start[: HEAD.size]))[6])


def parse_blob(head: ByteString, nbytes: int) -> Blob:
    """The head and descriptors of a blob of `nbytes` bytes. `head` may be all of it or `head_bytes` of it.

    Raises ValueError where fields contradict each other or the length.
    """
    return parse_blobs([(head, nbytes)])[0]


def parse_blobs(blobs: Sequence[tuple[ByteString, int]]) -> list[Blob]:
    """`parse_blob` of each `(head, nbytes)`, with the same few operations for any number of them."""
    heads = [_read_head(head, nbytes) for head, nbytes in blobs]
    if not heads:
        return []
    streams = np.frombuffer(b"".join([head.descriptors for head in heads]), DESCRIPTOR)
    columns = _Columns(streams, heads)
    columns.check()
    offsets = columns.offsets()
    found, first = [], 0
    for head, (_, nbytes) in zip(heads, blobs, strict=True):
        stop = first + head.stream_count
        if head.stream_count > MAX_STREAMS_OF_PART:
            _check_parts(columns.part[first:stop])
        end = int(offsets[stop - 1, 4])
        _require(end + END_BYTES == nbytes, f"{nbytes} bytes, expected {end + END_BYTES}")
        some = slice(first, stop)
        mine = streams[some], columns.base[some], columns.span[some], offsets[some]
        found.append(Blob(head.element_bytes, head.order, head.part_log2, head.elements, *mine, nbytes))
        first = stop
    return found


def decode_stream(data: Bytes, blob: Blob, stream: int, first_block: int = 0, stop_block: int | None = None) -> Any:
    """`(positions, values, first rank)` of the changes in blocks [first_block, stop_block) of one stream.

    Positions are int64 elements of the tensor; values the v step bits, uint32; ranks count from the stream's start.
    """
    head = blob.streams[stream]
    k, v, count, nbits = (int(head[name]) for name in ("k", "v", "count", "nbits"))
    _, index_at, unary_at, fields_at, _ = blob.offsets[stream].tolist()
    stop_block = int(blob.blocks[stream]) if stop_block is None else stop_block
    position, rank = data[index_at + 8 * first_block :][:8].view("<u4").astype(np.int64).tolist()
    first_bit, stop_bit = BLOCK_BITS * first_block, min(BLOCK_BITS * stop_block, nbits)
    unary = data[unary_at + first_bit // 8 : unary_at + -(-stop_bit // 32) * 4]
    fields = data[fields_at : fields_at + -(-count * (k + v) // 32) * 4]
    base, most = int(head["part"]) << blob.part_log2, count - rank
    positions, values, _ = host_ops().decode_bits(
        unary, stop_bit - first_bit, fields, first=rank, most=most, k=k, v=v, position=base + position, want_pairs=False
    )
    return positions, values, rank


class _Head(NamedTuple):
    element_bytes: int
    order: int
    part_log2: int
    elements: int
    stream_count: int
    descriptors: bytes

    @property
    def nbytes(self) -> int:
        return HEAD.size + len(self.descriptors)


def _read_head(head: ByteString, nbytes: int) -> _Head:
    _require(nbytes >= HEAD.size + END_BYTES and len(head) >= HEAD.size, f"{nbytes} bytes are too few")
    magic, element_bytes, order, part_log2, zero, elements, count, zeros = HEAD.unpack(head[: HEAD.size])
    _require(magic == MAGIC, f"magic is {magic!r}")
    _require(element_bytes in (1, 2, 4, 8) and order <= 1, f"element size {element_bytes}, order {order}")
    _require(10 <= part_log2 <= 31 and zero == 0 and zeros == 0, "part size or reserved fields out of range")
    _require(elements < 1 << 60, f"{elements} elements")
    start = HEAD.size + DESCRIPTOR.itemsize * count
    _require(count >= 1 and start + END_BYTES <= nbytes and len(head) >= start, f"{count} streams do not fit")
    return _Head(element_bytes, order, part_log2, elements, count, bytes(head[HEAD.size : start]))


class _Columns:
    """The fields of descriptors as int64, one array each, with what the heads before them say."""

    def __init__(self, streams: npt.NDArray[Any], heads: Sequence[_Head]) -> None:
        words = streams.view("<u4").reshape(-1, 4).astype(np.int64)
        self.count, self.nbits, self.part, form = words.T
        self.g, self.k, self.v, self.kind = form & 255, form >> 8 & 255, form >> 16 & 255, form >> 24
        counts = [head.stream_count for head in heads]
        told = zip(heads, accumulate(counts, initial=0), strict=False)
        rows = np.array([(*head[:4], first, head.nbytes) for head, first in told], np.int64)
        self.element_bytes, _, part_log2, self.elements, self._first, self._head_bytes = np.repeat(
            rows, counts, axis=0
        ).T
        self.base = self.part << part_log2
        self.span = np.minimum(self.elements - self.base, 1 << part_log2)

    def check(self) -> None:
        """Every bound that the decoders rely on, but for those of a blob as a whole."""
        count, nbits, k, v, literal = self.count, self.nbits, self.k, self.v, self.kind == LITERAL
        wrong = (
            (self.base >= self.elements, "part out of range"),
            ((count < 1) | (count > self.span), "count out of range"),
            ((k > 16) | (v > 16), "k or v out of range"),
            ((count > nbits) | (nbits - count > self.span >> k), "bit count out of range"),
            (self.kind > LITERAL, "unknown kind"),
            (((v < 1) != literal) | (literal & (self.g > 0)), "v or g do not fit the kind"),
            (self.g >= 8 * self.element_bytes, "g out of range"),
        )
        if np.logical_or.reduce([found for found, _ in wrong]).any():
            found, what = next(each for each in wrong if each[0].any())
            stream = int(np.argmax(found))
            raise _wrong(f"stream {stream - int(self._first[stream])}: {what}")

    def offsets(self) -> Ints:
        """`Blob.offsets`."""
        literals = _pad((self.kind == LITERAL) * self.count * self.element_bytes)
        index = -(-self.nbits // BLOCK_BITS) * 8
        unary = -(-self.nbits // 32) * 4
        fields = -(-self.count * (self.k + self.v) // 32) * 4
        size = literals + _pad(index + unary + fields)
        start = np.cumsum(size) - size
        found = np.empty((len(size), 5), np.int64)
        found[:, 0] = start - start[self._first] + self._head_bytes
        found[:, 1] = found[:, 0] + literals
        found[:, 2] = found[:, 1] + index
        found[:, 3] = found[:, 2] + unary
        found[:, 4] = found[:, 0] + size
        return found


def _check_parts(part: Ints) -> None:
    most = int(np.unique(part, return_counts=True)[1].max())
    _require(most <= MAX_STREAMS_OF_PART, f"{most} streams of one part, expected at most {MAX_STREAMS_OF_PART}")


def padded_literals(streams: npt.NDArray[Any], element_bytes: int | Ints) -> Ints:
    return np.where(streams["kind"] == LITERAL, _pad(streams["count"].astype(np.int64) * element_bytes), 0)


def _pad(nbytes: Ints) -> Ints:
    return -(-nbytes // 8) * 8


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _wrong(what)


def _wrong(what: str) -> ValueError:
    return ValueError(f"not a GS01 blob: {what}")
