"""A reader of GP01 payloads, from the drawing of their layout: strict, nothing of gpusync.

Gives the GS01 blob that was packed, for the readers of that. ValueError for whatever the layout does not allow; what a
blob does not allow is for its readers.
"""

from __future__ import annotations

import struct

import numpy as np

from support.gs01 import decode_gs01

MOST_BYTES, MOST_CHANGES = 1 << 20, 1 << 13


def decode_gp01(payload: bytes, old: np.ndarray, dtype: str) -> np.ndarray:
    """The new bytes of a tensor whose old ones are `old`."""
    return decode_gs01(unpack_gp01(payload), old, dtype)


def unpack_gp01(payload: bytes) -> bytes:
    _expect(payload[:4] == b"GP01" and 7 <= len(payload) <= MOST_BYTES, "length")
    es, order, log2 = 1 << (payload[4] & 3), payload[4] >> 2 & 1, 10 + (payload[4] >> 3)
    elements, at = _number(payload, 5)
    count, at = _number(payload, at)
    _expect(log2 <= 31 and 1 <= count <= MOST_CHANGES, "head")
    heads, part = [], 0
    for _ in range(count):
        passed, at = _number(payload, at)
        changes, at = _number(payload, at)
        zeros, at = _number(payload, at)
        _expect(at + 3 <= len(payload), "length")
        part += passed
        _expect(part << log2 < elements and part < 1 << 32, "part")
        heads.append((changes, changes + zeros, part, payload[at] & 127, *payload[at + 1 : at + 3], payload[at] >> 7))
        at += 3
    _expect(sum(head[0] for head in heads) <= MOST_CHANGES, "changes")
    _expect(all(k <= 16 and v <= 16 for *_, k, v, _ in heads), "k or v")
    bodies = b""
    for changes, nbits, _, _, k, v, kind in heads:
        words, at = _take(payload, at, 8 * es * changes * kind)
        unary, at = _take(payload, at, nbits)
        fields, at = _take(payload, at, changes * (k + v))
        body = _index(unary, fields, changes, nbits, k, v) + _filled(unary, 4) + _filled(fields, 4)
        bodies += _filled(words, 8) + _filled(body, 8)
    _expect(at == len(payload), "length")
    start = b"GS01" + struct.pack("<4BQII", es, order, log2, 0, elements, count, 0)
    return start + b"".join(struct.pack("<IIIBBBB", *head) for head in heads) + bodies + bytes(8)


def _index(unary: bytes, fields: bytes, changes: int, nbits: int, k: int, v: int) -> bytes:
    pairs, position, rank = b"", 0, 0
    ones, low = int.from_bytes(unary, "little"), int.from_bytes(fields, "little")
    for bit in range(nbits):
        if bit % 1024 == 0:
            pairs += struct.pack("<II", position % (1 << 32), rank)
        if ones >> bit & 1 and rank < changes:
            position += (low >> rank * (k + v) & (1 << k) - 1) + 1
            rank += 1
        else:
            position += 1 << k
    return pairs


def _number(payload: bytes, at: int) -> tuple[int, int]:
    """LEB128, as short as it can be: `(value, where it ends)`."""
    value = 0
    for size in range(1, 10):
        _expect(at + size <= len(payload), "length")
        byte = payload[at + size - 1]
        value |= (byte & 127) << 7 * (size - 1)
        if byte < 128:
            _expect(byte > 0 or size == 1, "number")
            return value, at + size
    raise ValueError("number")


def _take(payload: bytes, at: int, bits: int) -> tuple[bytes, int]:
    end = at + -(-bits // 8)
    _expect(end <= len(payload), "length")
    _expect(int.from_bytes(payload[at:end], "little") >> bits == 0, "padding")
    return payload[at:end], end


def _filled(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
