"""A reader of GS01 payloads, from the drawing of their layout: strict, one bit after the other, nothing of gpusync.

ValueError for whatever the layout does not allow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from support.gf01 import ELEMENTS

Change = tuple[int, int | None, int]


def decode_gs01(payload: bytes, old: np.ndarray, dtype: str) -> np.ndarray:
    """The new bytes of a tensor whose old ones are `old`."""
    es = ELEMENTS.get(dtype, (1, 0))[0]
    words = old.view(f"<u{es}").tolist()
    order = payload[5]
    for position, step, word in read_gs01(payload, es=es, elements=len(words)):
        words[position] = word if step is None else _moved(words[position], step, es, order)
    return np.array(words, f"<u{es}").view(np.uint8)


def read_gs01(payload: bytes, *, es: int, elements: int) -> list[Change]:
    """(element, step, 0) of every change, or (element, None, new word), in the order of the streams."""
    _expect(len(payload) >= 32, "length")
    magic, found_es, order, log2, zero, n, streams, zeros = struct.unpack_from("<4s4BQII", payload)
    _expect(magic == b"GS01" and found_es == es and n == elements, "head")
    _expect(order <= 1 and 10 <= log2 <= 31 and zero == 0 and zeros == 0 and streams >= 1, "head")
    at = 24 + 16 * streams
    _expect(at + 8 <= len(payload), "length")
    seen: set[int] = set()
    parts: dict[int, int] = {}
    changes: list[Change] = []
    for number in range(streams):
        head = struct.unpack_from("<IIIBBBB", payload, 24 + 16 * number)
        part = head[2]
        parts[part] = parts.get(part, 0) + 1
        _expect(parts[part] <= 64, "streams of a part")
        _expect(part << log2 < elements, "part")
        span = min(1 << log2, elements - (part << log2))
        stream = _Stream(payload, at, head, es, span)
        for position, step, word in stream.changes():
            element = (part << log2) + position
            _expect(element not in seen, "element twice")
            seen.add(element)
            changes.append((element, step, word))
        at = stream.end
    _expect(len(payload) == at + 8 and not any(payload[at:]), "end")
    return changes


class _Stream:
    def __init__(self, payload: bytes, at: int, head: tuple[int, ...], es: int, span: int) -> None:
        self.count, self.nbits, _, self.g, self.k, self.v, self.kind = head
        _expect(1 <= self.count <= span and self.k <= 16 and self.v <= 16 and self.kind <= 1, "descriptor")
        _expect(self.count <= self.nbits <= self.count + (span >> self.k), "bits")
        _expect(self.v == self.g == 0 if self.kind else self.v >= 1 and self.g < 8 * es, "descriptor")
        self.payload, self.es, self.span = payload, es, span
        self.literals = at
        self.index = at + (-(-self.count * es // 8) * 8 if self.kind else 0)
        self.unary = self.index + 8 * -(-self.nbits // 1024)
        self.fields = self.unary + 4 * -(-self.nbits // 32)
        self.end = self.index + -(-(self.fields - self.index + 4 * -(-self.count * (self.k + self.v) // 32)) // 8) * 8
        _expect(self.end + 8 <= len(payload), "length")
        _expect(_is_zero(payload, 8 * self.unary + self.nbits, 8 * self.fields), "padding")
        _expect(_is_zero(payload, 8 * self.fields + self.count * (self.k + self.v), 8 * self.end), "padding")
        if self.kind:
            _expect(_is_zero(payload, 8 * (at + self.count * es), 8 * self.index), "padding")

    def changes(self) -> Iterator[Change]:
        position, rank = 0, 0
        for bit in range(self.nbits):
            if bit % 1024 == 0:
                pair = struct.unpack_from("<II", self.payload, self.index + bit // 1024 * 8)
                _expect(pair == (position, rank), "index")
            if not self.payload[self.unary + bit // 8] >> bit % 8 & 1:
                position += 1 << self.k
                continue
            _expect(rank < self.count, "ones")
            field = self._field(rank)
            position += (field & (1 << self.k) - 1) + 1
            _expect(position <= self.span, "position")
            yield position - 1, *self._change(field >> self.k, rank)
            rank += 1
        _expect(rank == self.count and bool(self.payload[self.unary + bit // 8] >> bit % 8 & 1), "ones")

    def _field(self, rank: int) -> int:
        width = self.k + self.v
        at = 8 * self.fields + rank * width
        return int.from_bytes(self.payload[at // 8 : at // 8 + 8], "little") >> at % 8 & (1 << width) - 1

    def _change(self, value: int, rank: int) -> tuple[int | None, int]:
        if self.kind:
            start = self.literals + rank * self.es
            return None, int.from_bytes(self.payload[start : start + self.es], "little")
        size = (value >> 1) + (1 << self.g)
        return -size if value & 1 else size, 0


def _moved(word: int, step: int, es: int, order: int) -> int:
    """M(M(word) + step), all in integers that wrap in es bytes."""
    bits = 8 * es
    mask, low = (1 << bits) - 1, (1 << bits - 1) - 1
    flip = lambda w: w ^ low if order == 1 and w >> bits - 1 else w  # noqa: E731
    return flip(flip(word) + step & mask)


def _is_zero(payload: bytes, start: int, stop: int) -> bool:
    """Whether the bits [start, stop) are zeros."""
    return int.from_bytes(payload[start // 8 : -(-stop // 8)], "little") >> start % 8 == 0


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
