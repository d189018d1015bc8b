"""The inner loops over changed elements in plain numpy: documentation and oracle of `host_numba`, and its stand-in.

All arrays are contiguous, positions int64, field values uint32, words unsigned or signed of the element's width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Bytes, Ints
from gpusync_kernels.word_order import SIGNED, Words, from_order, to_order

BLOCK_BITS = 1024
UNSIGNED: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
LINE_BYTES = 64
_DENSE_WORDS = 1 << 16
_WORD_LOG2 = {1: 3, 2: 2, 4: 1, 8: 0}  # elements in eight bytes
# Where more than one word of so many elements differs, all steps are computed.
_SPARSE = 16
# Unary bits decoded together: what is made of them stays in a core's L2.
_STRETCH_BITS = 1 << 16
_COUNTING = np.arange(_STRETCH_BITS)

Values = npt.NDArray[np.uint32]

_NO_PAIRS = np.empty((0, 2), np.int64)


def decode_bits(
    unary: Bytes,
    bits: int,
    fields: Bytes,
    *,
    first: int,
    most: int,
    k: int,
    v: int,
    position: int,
    want_pairs: bool = True,
) -> tuple[Ints, Values, Ints]:
    """`(positions, values, pairs)` of the ones among the first `bits` bits of `unary`, at most `most` of them.

    `fields` holds that of the first one as its field number `first`. `position` is the sum of what all bits before add
    up to. Both buffers are whole u32 words. `pairs`, int64 [blocks + 1, 2], is what an index would say at every
    1,024th bit, counted from here, and behind the last bit; nothing unless they are wanted.

    k = 1, v = 0, bits 0 1 1, fields 1 0, position 0: a zero adds 2, a one its low bits + 1, so the changes are at 3, 4
    and the pairs (0, 0) and (5, 2)
    """
    ones = _ones(unary, bits)[: max(most, 0)]
    packed = unpack_fields(fields, k + v, first, len(ones))
    sums = _low_sums(packed, k)
    positions = ones - np.arange(len(ones))
    positions <<= k
    positions += sums
    positions += position - 1
    return positions, packed >> np.uint32(k), _pairs(ones, sums, bits, k, position) if want_pairs else _NO_PAIRS


def set_marks(marks: Bytes, positions: Ints) -> bool:
    """Sets bit p of `marks`, counted from each byte's lowest, for every p of `positions`, which are all different.
    Returns whether one was set already.
    """
    at, flags = positions >> 3, np.left_shift(1, positions & 7, dtype=np.uint8, casting="unsafe")
    is_twice = bool((marks[at] & flags).any())
    np.bitwise_or.at(marks, at, flags)
    return is_twice


def _ones(unary: Bytes, bits: int) -> Ints:
    found: Ints = np.unpackbits(unary, count=bits, bitorder="little").view(np.bool_).nonzero()[0]
    return found


def _low_sums(packed: Values, k: int) -> Ints:
    """What ones up to each add up to: their low bits + 1."""
    low = packed & np.uint32((1 << k) - 1)
    low += np.uint32(1)
    sums: Ints = np.add.accumulate(low, dtype=np.int64)
    return sums


def _pairs(ones: Ints, sums: Ints, bits: int, k: int, position: int) -> Ints:
    borders = np.minimum(np.arange(-(-bits // BLOCK_BITS) + 1) * BLOCK_BITS, bits)
    ranks = np.searchsorted(ones, borders)
    low = np.where(ranks > 0, sums[np.maximum(ranks, 1) - 1], 0) if len(sums) else np.zeros_like(ranks)
    return np.stack([position + ((borders - ranks) << k) + low, ranks], 1)


def add_steps(words: Words, index: Ints, steps: Words, *, order: int, revert: bool) -> None:
    """Adds signed `steps` to `words[index]`, which are unsigned and all different; or takes them off."""
    old = to_order(words.take(index), order)
    words[index] = from_order(old - steps if revert else old + steps, order)


def add_streams(words: Words, data: Bytes, streams: Ints, *, order: int, revert: bool) -> None:
    """Adds those steps of a blob's streams that lie in `words`, or takes them off; `data` are the blob's bytes.

    `streams`, int64 [streams, 10]: the index in `words` (or before them) that positions count from, span, count, nbits,
    k, v, 2**g, and where index, unary and fields begin. The head has been checked; changes behind the span are left
    out. An index that is wrong may lead to other changes, in numba to others than here.
    """
    for start, span, count, nbits, k, v, magnitude, index_at, unary_at, fields_at in streams.tolist():
        stop = min(start + span, len(words))
        pairs = data[index_at:unary_at].view("<u4").reshape(-1, 2)
        block = max(int(np.searchsorted(pairs[:, 0], -start, "right")) - 1, 0) if start < 0 else 0
        position, rank = start + int(pairs[block, 0]), min(int(pairs[block, 1]), count)
        for bit in range(block * BLOCK_BITS, nbits, _STRETCH_BITS):
            if position >= stop:
                break
            bits = min(_STRETCH_BITS, nbits - bit)
            ones = _ones(data[unary_at + bit // 8 : unary_at + -(-(bit + bits) // 8)], bits)[: count - rank]
            found = len(ones)
            packed = unpack_fields(data[fields_at:], k + v, rank, found)
            positions = _low_sums(packed, k)
            zeros = bits - found
            end = position + (zeros << k) + (int(positions[-1]) if found else 0)
            ones -= _COUNTING[:found]
            ones <<= k
            positions += ones
            positions += position - 1
            packed >>= np.uint32(k)
            first = 0 if position >= 0 else int(np.searchsorted(positions, 0))
            last = found if end <= stop else int(np.searchsorted(positions, stop))
            steps = step_of(packed[first:last], magnitude, words.itemsize)
            add_steps(words, positions[first:last], steps, order=order, revert=revert)
            rank, position = rank + found, end


def change_words(words: Words, positions: npt.NDArray[Any], values: Words, *, first: int, is_xor: bool) -> None:
    """Writes `values` to `words[positions - first]`, or xors them into it; positions beyond `words` are left out.

    Positions are u32 or u64, all different. `words` may lie at any address.
    """
    index = positions.astype(np.int64)
    index -= first
    inside = (index >= 0) & (index < len(words))
    if not inside.all():
        index, values = index[inside], values[inside]
    if is_xor:
        words[index] ^= values
    else:
        words[index] = values


def changed_positions(old: Bytes | None, new: Bytes, *, element_bytes: int) -> npt.NDArray[np.uint32]:
    """Ascending positions of elements that differ in equally long windows; without `old`, of those that are not zero.

    64 bytes are looked at together and only those that differ again: few do, mostly.
    """
    kind, per_line = UNSIGNED[element_bytes], LINE_BYTES // element_bytes
    whole = new.size - new.size % LINE_BYTES
    differences = new[:whole].view("<u8")
    if old is not None:
        differences = old[:whole].view("<u8") ^ differences
    lines = np.flatnonzero((differences != 0).view("<u8"))  # eight flags, a line's words, as one
    found = np.flatnonzero(differences.view(kind).reshape(-1, per_line)[lines].reshape(-1) != 0)
    head = lines[found // per_line] * per_line + found % per_line
    rest = new[whole:].view(kind) if old is None else old[whole:].view(kind) ^ new[whole:].view(kind)
    tail = np.flatnonzero(rest) + whole // element_bytes
    return np.concatenate([head, tail]).astype("<u4")


def find_steps(
    old: Bytes, new: Bytes, *, element_bytes: int, order: int, most: int
) -> tuple[npt.NDArray[np.uint32], Words] | None:
    """`(ascending positions of elements that differ, signed steps from old to new)` of equally long windows; None if
    they are more than `most`.

    Eight bytes are compared together, and of 64 of them that are equal one look is enough: few differ, mostly.
    """
    kind, log2 = UNSIGNED[element_bytes], _WORD_LOG2[element_bytes]
    whole = old.size - old.size % LINE_BYTES
    old_words, new_words = old[:whole].view("<u8"), new[:whole].view("<u8")
    differ = old_words != new_words
    words = int(np.count_nonzero(differ))
    if words > most:
        return None
    if _SPARSE * words * element_bytes > old.size:
        positions, steps = _find_dense(old.view(kind), new.view(kind), order)
        return (positions, steps) if len(positions) <= most else None
    flags = differ.view("<u8")  # eight flags, a line's words, as one
    lines = (flags != 0).nonzero()[0]
    at = flags.take(lines).view(np.bool_).nonzero()[0]
    at += ((lines << 3) - np.arange(0, 8 * len(lines), 8)).take(at >> 3)
    before, after = old_words.take(at).view(kind), new_words.take(at).view(kind)
    found = (before != after).nonzero()[0]
    at -= np.arange(len(at))
    positions = (at << log2).take(found >> log2) + found
    before, after = before.take(found), after.take(found)
    old_tail, new_tail = old[whole:].view(kind), new[whole:].view(kind)
    tail = (old_tail != new_tail).nonzero()[0]
    if len(tail):
        positions = np.concatenate([positions, tail + whole // element_bytes])
        before, after = np.concatenate([before, old_tail[tail]]), np.concatenate([after, new_tail[tail]])
    if len(positions) > most:
        return None
    return positions.astype("<u4"), to_order(after, order) - to_order(before, order)


def _find_dense(old: Words, new: Words, order: int) -> tuple[npt.NDArray[np.uint32], Words]:
    """All steps are computed, a stretch at a time; those of zero are left out."""
    positions, steps = [], []
    for start in range(0, len(old), _DENSE_WORDS):
        stretch = slice(start, start + _DENSE_WORDS)
        each = to_order(new[stretch], order) - to_order(old[stretch], order)
        found = np.flatnonzero(each)
        positions.append((found + start).astype("<u4"))
        steps.append(each[found])
    return np.concatenate(positions), np.concatenate(steps)


def pack_changes(positions: Ints, values: Values, *, k: int, v: int) -> tuple[int, Any, Any, Any]:
    """`(bits, index, unary, fields)` of one stream: ascending positions from its part's start, values below 2**v.

    `index` is u32 [blocks, 2], the others u32 words; all little-endian.
    """
    gaps = gaps_of(positions)
    ones = np.add.accumulate(gaps >> k)
    ones += np.arange(len(ones))
    bits = int(ones[-1]) + 1
    flags = np.zeros(-(-bits // 32) * 32, np.uint8)
    flags[ones] = 1
    starts = np.arange(0, bits, BLOCK_BITS)
    ranks = ones.searchsorted(starts)
    last = np.maximum(ranks, 1) - 1
    reached = np.where(ranks > 0, positions[last] + 1, 0)
    passed = np.where(ranks > 0, ones[last] + 1, 0)
    index = np.stack([reached + ((starts - passed) << k), ranks], 1).astype("<u4")
    fields = (gaps & ((1 << k) - 1)).astype(np.uint32)
    fields |= values << np.uint32(k)
    return bits, index, np.packbits(flags, bitorder="little").view("<u4"), pack_fields(fields, k + v)


def gaps_of(positions: Ints) -> Ints:
    """How many elements lie before each change, behind the one before."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def step_of(values: Values, magnitude: int, element_bytes: int) -> npt.NDArray[Any]:
    """x = ((|d| - 2**g) << 1) | (d < 0) back to d, wrapped to the element's width. x = 5, 2**g = 4: d = -6."""
    kind, one = UNSIGNED[element_bytes], np.uint16(1)
    narrow = values.astype(np.uint16)
    size: Words = (narrow >> one).astype(kind, copy=False)
    narrow &= one
    negative = kind.type(0) - narrow.astype(kind, copy=False)  # all ones, or none
    size += kind.type(magnitude % (1 << 8 * element_bytes))  # 2**63 is negative where it is kept as int64
    size ^= negative
    size -= negative
    return size.view(SIGNED[element_bytes])


def unpack_fields(data: Bytes, width: int, first: int, count: int) -> Values:
    """Fields [first, first + count) of `width` <= 32 bits, packed from bit 0 on."""
    if width == 0 or count == 0:
        return np.zeros(count, np.uint32)
    skipped = first % 8  # 8 fields fill `width` bytes: every column of such a row has one shift
    groups = -(-(skipped + count) // 8)
    source = data[first // 8 * width :][: groups * width]
    room = np.empty(groups * width + 8, np.uint8)
    room[: len(source)] = source
    room[len(source) :] = 0
    kind = UNSIGNED[4 if width <= 25 else 8]
    fields = np.empty((groups, 8), kind)
    for column in range(8):
        at, shift = divmod(column * width, 8)
        words: Words = np.ndarray(groups, kind, room, at, width)
        np.right_shift(words, kind.type(shift), out=fields[:, column])
    found = fields.reshape(-1)[skipped : skipped + count]
    found &= kind.type((1 << width) - 1)
    return found.astype(np.uint32, copy=False)


def pack_fields(fields: Values, width: int) -> npt.NDArray[np.uint32]:
    """The inverse of `unpack_fields` from 0 on, as little-endian u32 words."""
    nbytes = -(-fields.size * width // 32) * 4
    if not nbytes:
        return np.empty(0, "<u4")
    while width < 4:  # two by two: what is written for a field must not reach the one eight fields on
        pairs = np.zeros(-(-fields.size // 2) * 2, np.uint32)
        pairs[: fields.size] = fields
        fields = pairs[::2] | (pairs[1::2] << np.uint32(width))
        width *= 2
    groups = -(-fields.size // 8)
    kind = UNSIGNED[4 if width <= 25 else 8]
    rows = np.zeros((groups, 8), kind)
    rows.reshape(-1)[: fields.size] = fields
    room = np.zeros(max(groups * width, nbytes) + 8, np.uint8)
    for column in range(8):
        at, shift = divmod(column * width, 8)
        words: Words = np.ndarray(groups, kind, room, at, width)
        words |= rows[:, column] << kind.type(shift)
    return room[:nbytes].view("<u4")
