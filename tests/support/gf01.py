"""A reader of GF01 payloads, from the drawing of their layout: strict, small, and nothing of gpusync."""

from __future__ import annotations

import struct

import numpy as np
import zstandard

# Bytes of an element, and whether it is sign and magnitude. Of what is not listed, elements are bytes.
ELEMENTS = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), (1, 1)),
    **dict.fromkeys(("I16", "U16"), (2, 0)), **dict.fromkeys(("F16", "BF16"), (2, 1)),
    **dict.fromkeys(("I32", "U32"), (4, 0)), **dict.fromkeys(("F32", "C64"), (4, 1)),
    **dict.fromkeys(("I64", "U64"), (8, 0)), "F64": (8, 1),
}  # fmt: skip


def decode_gf01(payload: bytes, old: np.ndarray, dtype: str) -> np.ndarray:
    """The new bytes of a tensor whose old ones are `old`."""
    magic, transform, es, order, log2, nbytes, count, reserved = struct.unpack_from("<4s4BQII", payload)
    assert transform <= 3
    assert (magic, es, nbytes, reserved) == (b"GF01", ELEMENTS.get(dtype, (1, 0))[0], old.size, 0)
    assert order in (0, 1)
    assert 16 <= log2 <= 20
    assert count == -(-nbytes // (1 << log2))
    sizes = struct.unpack_from(f"<{count}I", payload, 24)
    at = 24 + 4 * count
    at += _zeros(payload, at)
    raw = b""
    for size in sizes:
        expected = min(1 << log2, nbytes - len(raw))
        frame = payload[at : at + size]
        parameters = zstandard.get_frame_parameters(frame)
        assert (parameters.content_size, parameters.dict_id) == (expected, 0)
        raw += zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        at += size
    assert at + _zeros(payload, at) == len(payload)
    words = np.frombuffer(raw, np.uint8)
    if transform == 0:
        return old ^ words
    joined = np.ascontiguousarray(words.reshape(es, -1).T).reshape(-1) if transform in (1, 2) else words
    return _stepped(old, joined, es, order) if transform == 1 else joined


def _stepped(old: np.ndarray, coded: np.ndarray, es: int, order: int) -> np.ndarray:
    """Old words moved by zig-zag coded steps, in Python's integers."""
    bits = 8 * es
    mask, low = (1 << bits) - 1, (1 << bits - 1) - 1
    flip = lambda w: w ^ low if order == 1 and w >> bits - 1 else w  # noqa: E731
    pairs = zip(old.view(f"<u{es}").tolist(), coded.view(f"<u{es}").tolist(), strict=True)
    moved = [flip(flip(word) + ((code >> 1) ^ -(code & 1)) & mask) for word, code in pairs]
    return np.array(moved, f"<u{es}").view(np.uint8)


def _zeros(payload: bytes, at: int) -> int:
    """The padding from `at` to the next multiple of 8."""
    count = -at % 8
    assert payload[at : at + count] == bytes(count)
    return count
