"""A small GS01 encoder for tests: one step stream per magnitude class, one literal stream, no search for the best k."""

from __future__ import annotations

import struct

import numpy as np

from gpusync_kernels.word_order import from_order, to_order

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def encode_blob(old: np.ndarray, new: np.ndarray, *, order: int, part_log2: int = 22, literal_from: int = 15) -> bytes:
    """`old` and `new`: unsigned words, different somewhere. Steps of 2**literal_from and more become literals."""
    element_bytes = old.itemsize
    descriptors, bodies = [], []
    for part in range(-(-old.size >> part_log2)):
        window = slice(part << part_log2, (part + 1) << part_log2)
        for kind, g, v, positions, values, words in _classes(old[window], new[window], order, literal_from):
            k, nbits, body = _encode_stream(positions, values, v, words)
            descriptors.append(struct.pack("<IIIBBBB", positions.size, nbits, part, g, k, v, kind))
            bodies.append(body)
    head = struct.pack("<4sBBBBQII", b"GS01", element_bytes, order, part_log2, 0, old.size, len(descriptors), 0)
    return head + b"".join(descriptors) + b"".join(bodies) + bytes(8)


def encode_twice(old: np.ndarray, new: np.ndarray) -> bytes:
    """A blob whose only stream is there twice: +1 wherever the words differ."""
    blob = encode_blob(np.zeros_like(old), (old != new).astype(old.dtype), order=0)
    assert blob[16:20] == (1).to_bytes(4, "little")
    descriptor, body = blob[24:40], blob[40:-8]
    return blob[:16] + (2).to_bytes(4, "little") + blob[20:24] + descriptor * 2 + body * 2 + bytes(8)


def changed_words(
    rng: np.random.Generator, count: int, *, element_bytes: int, order: int, density: float, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """`(old, new)`: steps of a few units ("small"), any new word ("any"), the corners of the number line ("edges")."""
    top = (1 << 8 * element_bytes) - 1
    dtype = UNSIGNED[element_bytes]
    corners = np.array([0, top, top >> 1, (top >> 1) + 1, 1, (top >> 1) + 2], dtype)
    old = rng.integers(0, top, count, dtype=dtype, endpoint=True)
    if kind == "edges":
        old = corners[rng.integers(0, corners.size, count)]
    new = old.copy()
    some = rng.random(count) < density
    some[rng.integers(count)] = True
    if kind == "small":
        steps = rng.integers(1, 9, count).astype(SIGNED[element_bytes]) * rng.choice([-1, 1], count).astype(
            SIGNED[element_bytes]
        )
        new[some] = from_order(to_order(old, order) + steps, order)[some]
    elif kind == "any":
        new[some] = rng.integers(0, top, count, dtype=dtype, endpoint=True)[some]
    else:
        new[some] = corners[rng.integers(0, corners.size, count)][some]
    if np.array_equal(old, new):
        new[0] ^= 1
    return old, new


def _classes(old: np.ndarray, new: np.ndarray, order: int, literal_from: int):
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return
    step = to_order(new, order)[changed] - to_order(old, order)[changed]
    negative = step < 0
    size = np.where(negative, -step, step).view(UNSIGNED[old.itemsize]).astype(np.uint64)
    exponent = np.array([int(each).bit_length() - 1 for each in size.tolist()])
    limit = literal_from if old.itemsize > 1 else 8
    for g in range(min(limit, 8 * old.itemsize)):
        some = exponent == g
        if some.any():
            values = ((size[some] - np.uint64(1 << g)) << np.uint64(1)) | negative[some].astype(np.uint64)
            yield 0, g, g + 1, changed[some], values, b""
    some = exponent >= limit
    if some.any():
        words = new[changed[some]].tobytes()
        yield 1, 0, 0, changed[some], np.zeros(int(some.sum()), np.uint64), words + bytes(-len(words) % 8)


def _encode_stream(positions: np.ndarray, values: np.ndarray, v: int, words: bytes) -> tuple[int, int, bytes]:
    gaps = np.diff(positions, prepend=-1) - 1
    k = min(16, 32 - v, max(0, int(np.log2(max(1.0, 0.69 * gaps.mean())))))
    ones = np.cumsum(gaps >> k) + np.arange(positions.size)
    nbits = int(ones[-1]) + 1
    bits = np.zeros(-(-nbits // 32) * 32, np.uint8)
    bits[ones] = 1
    starts = np.arange(0, nbits, 1024)
    ranks = np.searchsorted(ones, starts)
    last = np.maximum(ranks, 1) - 1
    reached = np.where(ranks > 0, positions[last] + 1, 0)
    passed = np.where(ranks > 0, ones[last] + 1, 0)
    index = np.stack([reached + ((starts - passed) << k), ranks], 1).astype("<u4")
    fields = _pack((gaps & ((1 << k) - 1)).astype(np.uint64) | (values << np.uint64(k)), k + v)
    body = index.tobytes() + np.packbits(bits, bitorder="little").tobytes() + fields
    return k, nbits, words + body + bytes(-len(body) % 8)


def _pack(fields: np.ndarray, width: int) -> bytes:
    """One field after another, bit 0 first, in whole 32-bit words."""
    if width == 0:
        return b""
    bits = ((fields[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)).astype(np.uint8).reshape(-1)
    return np.packbits(np.pad(bits, (0, -bits.size % 32)), bitorder="little").tobytes()
