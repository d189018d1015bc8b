# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, unreachable"
"""The inner loops over changed elements in numba: `host_numpy`, which documents them, bit for bit and faster.

They release the interpreter lock. Positions come first, into an array, and words are changed in a second, plain loop:
that one keeps many cache misses in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint8, uint32, uint64
from numba.core import cgutils
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

from gpusync_kernels.buffers import Bytes, Ints
from gpusync_kernels.host_numpy import BLOCK_BITS, UNSIGNED, Values
from gpusync_kernels.word_order import SIGNED, Words

CACHING = "compiled code is kept on disk"


@intrinsic
def _prefetch(typing_context, array, index):
    """Asks for the cache line of `array[index]`, to be written; waits for nothing."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, made, [arguments[1]])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        builder.call(prefetch, [builder.bitcast(place, byte), flag(1), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def compiled(function: Any) -> Any:
    """Machine code is kept on disk where numba finds a place for it; without one it is compiled in every process."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        globals()["CACHING"] = "compiled in every process: no directory for compiled code is writable"
        return njit(nogil=True)(function)


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
    most = max(min(most, bits), 0)
    positions, values = np.empty(most, np.int64), np.empty(most, np.uint32)
    pairs = np.empty((-(-bits // BLOCK_BITS) + 1, 2), np.int64)
    found = _decode(unary.view("<u4"), bits, fields.view("<u4"), first, k, v, position, positions, values, pairs)
    return positions[:found], values[:found], pairs if want_pairs else pairs[:0]


def set_marks(marks: Bytes, positions: Ints) -> bool:
    return bool(_set_marks(marks, positions))


def add_steps(words: Words, index: Ints, steps: Words, *, order: int, revert: bool) -> None:
    bits = 8 * words.itemsize
    flipped = (1 << (bits - 1)) - 1 if order == 1 else 0
    _add(words.view(SIGNED[words.itemsize]), index, steps, bits, flipped, -1 if revert else 1)


def add_streams(words: Words, data: Bytes, streams: Ints, *, order: int, revert: bool) -> None:
    bits = 8 * words.itemsize
    flipped = (1 << (bits - 1)) - 1 if order == 1 else 0
    _add_streams(words.view(SIGNED[words.itemsize]), data.view("<u4"), streams, bits, flipped, int(revert))


def change_words(words: Words, positions: Any, values: Words, *, first: int, is_xor: bool) -> None:
    (_xor_words if is_xor else _write_words)(words, positions, values, first)


def changed_positions(old: Bytes | None, new: Bytes, *, element_bytes: int) -> Any:
    whole, kind = new.size - new.size % 8, UNSIGNED[element_bytes]
    found = np.empty(len(new) // element_bytes, "<u4")
    if old is None:
        count = _nonzero_positions(new[:whole].view("<u8"), new.view(kind), found)
    else:
        sides = (old[:whole].view("<u8"), new[:whole].view("<u8"))
        count = _changed_positions(*sides, old.view(kind), new.view(kind), found)
    return found[:count].copy()


def find_steps(old: Bytes, new: Bytes, *, element_bytes: int, order: int, most: int) -> tuple[Any, Words] | None:
    before, after = old.view(SIGNED[element_bytes]), new.view(SIGNED[element_bytes])
    whole = old.size - old.size % 8
    room = min(most, len(before)) + 8
    positions, steps = np.empty(room, "<u4"), np.empty(room, SIGNED[element_bytes])
    bits = 8 * element_bytes
    flipped = (1 << (bits - 1)) - 1 if order == 1 else 0
    sides = (old[:whole].view("<u8"), new[:whole].view("<u8"))
    found = _find(*sides, before, after, bits, flipped, positions, steps, most)
    if found > most:
        return None
    if 2 * found > room:
        return positions[:found], steps[:found]
    return positions[:found].copy(), steps[:found].copy()


def pack_changes(positions: Ints, values: Values, *, k: int, v: int) -> tuple[int, Any, Any, Any]:
    bits = int(_unary_bits(positions, k))
    unary = np.zeros(-(-bits // 32), "<u4")
    fields = np.zeros(-(-len(positions) * (k + v) // 32), "<u4")
    index = np.zeros((-(-bits // BLOCK_BITS), 2), "<u4")
    _pack(positions, values, k, v, unary, fields, index)
    return bits, index, unary, fields


@compiled
def _stepped(word, step, bits, flipped):
    top, lost = int64(bits - 1), int64(64 - bits)
    word ^= (word >> top) & int64(flipped)
    word = ((word + step) << lost) >> lost
    return word ^ ((word >> top) & int64(flipped))


@compiled
def _find_elements(before, after, start, stop, bits, flipped, positions, steps, found):
    top = int64(bits - 1)
    for number in range(start, stop):
        if before[number] != after[number]:
            was, now = int64(before[number]), int64(after[number])
            was ^= (was >> top) & int64(flipped)
            now ^= (now >> top) & int64(flipped)
            positions[found] = number
            steps[found] = now - was
            found += 1
    return found


@compiled
def _decode(unary, bits, fields, first, k, v, position, positions, values, pairs):
    found = 0
    width, low, high = uint64(k + v), uint64((1 << k) - 1), uint64((1 << v) - 1)
    at = uint64(first) * width
    most, last = len(positions), len(fields) - 1
    for number in range((bits + 31) // 32):
        if number & 31 == 0:
            pairs[number >> 5, 0], pairs[number >> 5, 1] = position, found
        word = uint64(unary[number])
        left = min(bits - 32 * number, 32)
        if left < 32:
            word &= (uint64(1) << uint64(left)) - uint64(1)
        passed = 0
        while word != 0 and found < most:
            bit = int64(trailing_zeros(word))
            word &= word - uint64(1)
            position += int64(bit - passed) << k
            passed = bit + 1
            field = uint64(0)
            if width != 0:
                here = int64(at >> uint64(5))
                field = uint64(fields[here])
                if here < last:
                    field |= uint64(fields[here + 1]) << uint64(32)
                field >>= at & uint64(31)
                at += width
            position += int64(field & low) + 1
            positions[found] = position - 1
            values[found] = uint32((field >> uint64(k)) & high)
            found += 1
        position += int64(left - passed) << k
    pairs[len(pairs) - 1, 0], pairs[len(pairs) - 1, 1] = position, found
    return found


@compiled
def _set_marks(marks, positions):
    is_twice = False
    for number in range(len(positions)):
        at, flag = positions[number] >> 3, uint8(1 << (positions[number] & 7))
        is_twice |= marks[at] & flag != 0
        marks[at] |= flag
    return is_twice


@compiled
def _add(words, index, steps, bits, flipped, sign):
    olds = np.empty(1024, words.dtype)
    for first in range(0, len(index), 1024):
        some = min(1024, len(index) - first)
        for change in range(some):
            olds[change] = words[index[first + change]]
        for change in range(some):
            step = sign * int64(steps[first + change])
            words[index[first + change]] = _stepped(int64(olds[change]), step, bits, flipped)


@compiled
def _block_with(words, index, blocks, position):
    """The last block that begins at or before a position of its part, by its index; the first if none does."""
    low, high = int64(0), int64(blocks)
    while high - low > 1:
        middle = (low + high) >> 1
        if int64(words[index + 2 * middle]) <= position:
            low = middle
        else:
            high = middle
    return low


@compiled
def _drop_before(index, steps, found):
    """Leaves out the changes that lie before the first word; returns how many are left."""
    skipped = 0
    while skipped < found and index[skipped] < 0:
        skipped += 1
    for change in range(found - skipped):
        index[change], steps[change] = index[change + skipped], steps[change + skipped]
    return found - skipped


@compiled
def _add_streams(words, data, streams, bits, flipped, revert):
    index, steps, olds = np.empty(1024, np.int64), np.empty(1024, np.int64), np.empty(1024, words.dtype)
    for number in range(len(streams)):
        start, span, count, nbits = streams[number, :4]
        low_bits, high_bits, magnitude = streams[number, 4:7]
        end, k, width = min(start + span, len(words)), uint64(low_bits), uint64(low_bits + high_bits)
        pairs, unary, fields = streams[number, 7] >> 2, streams[number, 8] >> 2, streams[number, 9] >> 2
        low, high = (uint64(1) << k) - uint64(1), (uint64(1) << (width - k)) - uint64(1)
        first = _block_with(data, pairs, (nbits + 1023) >> 10, -start) if start < 0 else int64(0)
        position, rank = start + int64(data[pairs + 2 * first]), min(int64(data[pairs + 2 * first + 1]), count)
        at = uint64(rank) * width
        for block in range(32 * first, (nbits + 31) // 32, 32):
            if position >= end:
                break
            is_before, found = position < 0, 0
            for place in range(block, min(block + 32, (nbits + 31) // 32)):
                word = uint64(data[unary + place])
                left = min(nbits - 32 * place, 32)
                if left < 32:
                    word &= (uint64(1) << uint64(left)) - uint64(1)
                passed = int64(0)
                while word != 0 and rank < count:
                    bit = int64(trailing_zeros(word))
                    word &= word - uint64(1)
                    here = fields + int64(at >> uint64(5))
                    field = (uint64(data[here]) | (uint64(data[here + 1]) << uint64(32))) >> (at & uint64(31))
                    at += width
                    position += ((bit - passed) << int64(k)) + int64(field & low) + 1
                    passed = bit + 1
                    value = int64((field >> k) & high)
                    size = magnitude + (value >> 1)
                    index[found] = position - 1
                    if position <= end:
                        _prefetch(words, position - 1)
                    steps[found] = -size if (value & 1) != revert else size
                    found += 1
                    rank += 1
                position += int64(32 - passed) << int64(k)
            if position > end:
                while found > 0 and index[found - 1] >= end:
                    found -= 1
            if is_before:
                found = _drop_before(index, steps, found)
            for change in range(found):  # loads alone: many cache misses in flight
                olds[change] = words[index[change]]
            for change in range(found):
                words[index[change]] = _stepped(int64(olds[change]), steps[change], bits, flipped)


@compiled
def _write_words(words, positions, values, first):
    for change in range(len(positions)):
        index = int64(positions[change]) - first
        if 0 <= index < len(words):
            words[index] = values[change]


@compiled
def _xor_words(words, positions, values, first):
    for change in range(len(positions)):
        index = int64(positions[change]) - first
        if 0 <= index < len(words):
            words[index] ^= values[change]


@compiled
def _nonzero_positions(words, elements, positions):
    """`words` are the same bytes as `elements`, as far as they make whole words of eight."""
    found, per_word = 0, 8 // elements.itemsize
    for number in range(len(words)):
        if words[number] != 0:
            for place in range(number * per_word, (number + 1) * per_word):
                positions[found] = place
                found += elements[place] != 0
    for place in range(len(words) * per_word, len(elements)):
        if elements[place] != 0:
            positions[found] = place
            found += 1
    return found


@compiled
def _changed_positions(old, new, before, after, positions):
    """`old` and `new` are the same bytes as `before` and `after`, as far as they make whole words of eight."""
    found, per_word = 0, 8 // before.itemsize
    for number in range(len(old)):
        if old[number] != new[number]:
            for place in range(number * per_word, (number + 1) * per_word):
                positions[found] = place
                found += before[place] != after[place]
    for place in range(len(old) * per_word, len(before)):
        if before[place] != after[place]:
            positions[found] = place
            found += 1
    return found


@compiled
def _find(old, new, before, after, bits, flipped, positions, steps, most):
    """`old` and `new` are the same bytes as `before` and `after`, as far as they make whole words of eight."""
    found, per_word = 0, 64 // bits
    for number in range(len(old)):
        if old[number] != new[number]:
            found = _find_elements(
                before, after, number * per_word, (number + 1) * per_word, bits, flipped, positions, steps, found
            )
            if found > most:
                return found
    return _find_elements(before, after, len(old) * per_word, len(before), bits, flipped, positions, steps, found)


@compiled
def _pack(positions, values, k, v, unary, fields, index):
    last, bit, block, low = int64(-1), int64(0), int64(0), (int64(1) << k) - 1
    width = k + v
    for number in range(len(positions)):
        gap = positions[number] - last - 1
        zeros = gap >> k
        while (block + 1) * 1024 <= bit + zeros:  # the block begins among these zeros, or with this one
            block += 1
            index[block, 0] = last + 1 + ((block * 1024 - bit) << k)
            index[block, 1] = number
        bit += zeros
        unary[bit >> 5] |= uint32(1) << uint32(bit & 31)
        bit += 1
        last = positions[number]
        if width != 0:
            field = uint64(gap & low) | (uint64(values[number]) << uint64(k))
            at = number * width
            here = at >> 5
            shifted = field << uint64(at & 31)
            fields[here] |= uint32(shifted & uint64(0xFFFFFFFF))
            if (at & 31) + width > 32:
                fields[here + 1] |= uint32(shifted >> uint64(32))


@compiled
def _unary_bits(positions, k):
    bits, last = int64(0), int64(-1)
    for number in range(len(positions)):
        bits += ((positions[number] - last - 1) >> k) + 1
        last = positions[number]
    return bits


# The first call of any of them takes numba a third of a second: here, where it is chosen, and not in the first update.
_unary_bits(np.zeros(1, np.int64), 0)
