"""GP01, packed steps: what a GS01 blob holds of a few changes, without what can be computed from the rest of it.

    "GP01" | u1: log2(es) | order << 2 | (L - 10) << 3 | n | S
    | per stream: part - part before | count | nbits - count | u1: g | kind << 7 | k u1 | v u1
    | per stream: words es * count (kind 1 only) | unary ceil(nbits / 8) | fields ceil(count * (k + v) / 8)

Fields are those of `gpusync_kernels.gs01`, numbers without a width LEB128. Nothing is aligned, unused bits are zero. A
reader expands it, and what decodes and checks GS01 takes it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.codec.payload import Payload, read_head
from gpusync.errors import NOWHERE, PayloadError, Where
from gpusync_kernels.gs01 import DESCRIPTOR, END_BYTES, HEAD, LITERAL, MAGIC
from gpusync_kernels.host import host_ops
from gpusync_kernels.host_numpy import BLOCK_BITS

GP01_MAGIC = b"GP01"
# With these a payload expands to less than 1.5 MiB, of at most as many streams as changes.
MAX_PACKED_BYTES = 1 << 20
MAX_PACKED_CHANGES = 1 << 13

_LEAST_LOG2, _MOST_LOG2 = 10, 31
_MOST_BITS = 16
# Seven bits a byte: below 2**63.
_NUMBER_BYTES = 9

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """A stream's descriptor in a GS01 blob."""

    count: int
    nbits: int
    part: int
    g: int
    k: int
    v: int
    kind: int

    @property
    def unary_bytes(self) -> int:
        return -(-self.nbits // 8)

    @property
    def field_bits(self) -> int:
        return self.count * (self.k + self.v)

    @property
    def field_bytes(self) -> int:
        return -(-self.field_bits // 8)

    def literal_bytes(self, element_bytes: int) -> int:
        return self.count * element_bytes if self.kind == LITERAL else 0

    def to_bytes(self) -> bytes:
        values = (self.count, self.nbits, self.part, self.g, self.k, self.v, self.kind)
        return np.array([values], DESCRIPTOR).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedStream:
    """A stream as a GS01 blob holds it, but for its padding: words of a literal (or none), the rest as u32 words."""

    head: StreamHead
    literals: Words
    index: Words
    unary: Words
    fields: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedHead:
    element_bytes: int
    order: int
    part_log2: int
    elements: int
    streams: int

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.elements * self.element_bytes


def pack(streams: Sequence[EncodedStream], *, element_bytes: int, order: int, part_log2: int, elements: int) -> bytes:
    """The payload of streams whose parts ascend, with MAX_PACKED_CHANGES changes at most.

    As long as a part has no more than 2**24 elements a change takes 60 bytes at most: no reader finds it too long.
    """
    form = (element_bytes.bit_length() - 1) | order << 2 | (part_log2 - _LEAST_LOG2) << 3
    pieces: list[Any] = [GP01_MAGIC, bytes([form]), _leb128(elements), _leb128(len(streams))]
    part = 0
    for head in (stream.head for stream in streams):
        pieces += _leb128(head.part - part), _leb128(head.count), _leb128(head.nbits - head.count)
        pieces.append(bytes([head.g | head.kind << 7, head.k, head.v]))
        part = head.part
    for stream in streams:
        pieces.append(stream.literals)
        pieces.append(stream.unary.view(np.uint8)[: stream.head.unary_bytes])
        pieces.append(stream.fields.view(np.uint8)[: stream.head.field_bytes])
    return b"".join(pieces)


def packed_stream_bytes(*, count: int, nbits: int, width: int) -> int:
    """What a stream of steps with fields of `width` bits takes, if the part before is near."""
    return 4 + len(_leb128(count)) + len(_leb128(nbits - count)) + -(-nbits // 8) + -(-count * width // 8)


def expand(payload: Payload, *, nbytes: int, element_bytes: int, where: Where = NOWHERE) -> bytes:
    """The GS01 blob that was packed, for a tensor of `nbytes` bytes.

    Lengths, numbers and unused bits are checked here; all else as in any blob, by who reads it. Raises PayloadError.
    """
    reader = _Reader(payload, where)
    head = reader.read_head()
    if head.element_bytes != element_bytes:
        raise PayloadError(
            "GP01 payload with a wrong element size", where=where, expected=element_bytes, found=head.element_bytes
        )
    if head.nbytes != nbytes:
        raise PayloadError("GP01 payload of another tensor", where=where, expected=f"{nbytes} bytes", found=head.nbytes)
    streams = reader.read_streams(head)
    start = HEAD.pack(MAGIC, element_bytes, head.order, head.part_log2, 0, head.elements, len(streams), 0)
    descriptors = [stream.to_bytes() for stream in streams]
    bodies = [reader.read_body(stream, element_bytes) for stream in streams]
    return b"".join((start, *descriptors, *bodies, bytes(END_BYTES)))


def packed_claims(payload: Payload, *, where: Where = NOWHERE) -> tuple[int, int]:
    """`(bytes of the tensor, bytes of the elements that change)` as the payload says. Raises PayloadError."""
    reader = _Reader(payload, where)
    head = reader.read_head()
    return head.nbytes, head.element_bytes * sum(stream.count for stream in reader.read_streams(head))


class _Reader:
    """Reads a payload front to back: its head, the descriptors, a body for each of them."""

    def __init__(self, payload: Payload, where: Where) -> None:
        if payload.nbytes > MAX_PACKED_BYTES:
            raise PayloadError(
                "GP01 payload is too long", where=where, expected=f"at most {MAX_PACKED_BYTES} bytes",
                found=payload.nbytes,
            )  # fmt: skip
        self._data = read_head(payload, payload.nbytes)
        self._where = where
        self._at = len(GP01_MAGIC)

    def read_head(self) -> _PackedHead:
        form = self._byte()
        part_log2 = _LEAST_LOG2 + (form >> 3)
        if part_log2 > _MOST_LOG2:
            raise self._wrong("part size", f"2**{_LEAST_LOG2} to 2**{_MOST_LOG2}", f"2**{part_log2}")
        head = _PackedHead(
            element_bytes=1 << (form & 3), order=form >> 2 & 1, part_log2=part_log2, elements=self._number(),
            streams=self._number(),
        )  # fmt: skip
        if not 1 <= head.streams <= MAX_PACKED_CHANGES:
            raise self._wrong("number of streams", f"1 to {MAX_PACKED_CHANGES}", head.streams)
        return head

    def read_streams(self, head: _PackedHead) -> list[StreamHead]:
        """Their descriptors, which account for every byte of the payload."""
        parts = min(-(-head.elements >> head.part_log2), 1 << 32)
        streams: list[StreamHead] = []
        part = changes = 0
        for _ in range(head.streams):
            part, count, zeros = part + self._number(), self._number(), self._number()
            g_and_kind, k, v = self._byte(), self._byte(), self._byte()
            if part >= parts:
                raise self._wrong("part", f"below {parts}", part)
            if k > _MOST_BITS or v > _MOST_BITS:
                raise self._wrong("k or v", f"at most {_MOST_BITS}", (k, v))
            changes += count
            if changes > MAX_PACKED_CHANGES:
                raise self._wrong("number of changes", f"at most {MAX_PACKED_CHANGES}", changes)
            streams.append(
                StreamHead(
                    count=count, nbits=count + zeros, part=part, g=g_and_kind & 127, k=k, v=v, kind=g_and_kind >> 7
                )
            )
        bodies = sum(each.literal_bytes(head.element_bytes) + each.unary_bytes + each.field_bytes for each in streams)
        if self._at + bodies != len(self._data):
            raise self._wrong("length", self._at + bodies, len(self._data))
        return streams

    def read_body(self, stream: StreamHead, element_bytes: int) -> bytearray:
        """The next one, as a blob has it."""
        literals = _padded(self._bytes(stream.literal_bytes(element_bytes)), 8)
        unary = self._bits(stream.nbits)
        fields = self._bits(stream.field_bits)
        return literals + _padded(_index(stream, unary, fields) + unary + fields, 8)

    def _bits(self, bits: int) -> bytearray:
        """Bits, of which the rest of the last byte is zeros, in whole u32 words."""
        data = self._bytes(-(-bits // 8))
        if bits % 8 and data[-1] >> bits % 8:
            raise self._wrong("padding", "zeros")
        return _padded(data, 4)

    def _bytes(self, nbytes: int) -> bytes:
        data = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return data

    def _byte(self) -> int:
        if self._at >= len(self._data):
            raise PayloadError(
                "GP01 payload is cut", where=self._where, expected=f"more than {len(self._data)} bytes",
                found=len(self._data),
            )  # fmt: skip
        self._at += 1
        return self._data[self._at - 1]

    def _number(self) -> int:
        start, value, byte = self._at, 0, 128
        while byte > 127 and self._at < start + _NUMBER_BYTES:
            byte = self._byte()
            value |= (byte & 127) << 7 * (self._at - start - 1)
        if byte > 127 or (byte == 0 and self._at > start + 1):
            raise self._wrong("number", "a minimal one below 2**63", self._data[start : self._at].hex())
        return value

    def _wrong(self, field: str, expected: object, found: object = None) -> PayloadError:
        return PayloadError(f"GP01 payload with a wrong {field}", where=self._where, expected=expected, found=found)


def _index(stream: StreamHead, unary: bytearray, fields: bytearray) -> bytes:
    """The pairs of a stream; most have the one that is always (0, 0)."""
    if stream.nbits <= BLOCK_BITS:
        return bytes(8)
    _, _, pairs = host_ops().decode_bits(
        np.frombuffer(unary, np.uint8), stream.nbits, np.frombuffer(fields, np.uint8), first=0, most=stream.count,
        k=stream.k, v=stream.v, position=0,
    )  # fmt: skip
    return bytes(pairs[:-1].astype("<u4"))


def _padded(data: bytes | bytearray, to: int) -> bytearray:
    return bytearray(data) + bytes(-len(data) % to)


def _leb128(value: int) -> bytes:
    """LEB128: seven bits a byte, the lowest first, all but the last with bit 7."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
