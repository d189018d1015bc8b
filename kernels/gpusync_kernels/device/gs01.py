# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One block of a GS01 stream, decoded with one lane per unary bit: no select, no compaction, two prefix sums."""

import triton
import triton.language as tl

NUM_WARPS = 8  # 64 registers a thread: with 4 warps it would be 112, for as many blocks at work and half the warps


@triton.jit
def read_pair(index, block):
    """`(position, rank)` of an index block, int64."""
    pair = (index + block * 8).to(tl.pointer_type(tl.uint32))
    return tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)


@triton.jit
def read_unary(unary, block, nbits):
    """The block's 1,024 unary bits as [32, 32], bit number ascending along both, and their 32 words."""
    row = tl.arange(0, 32)
    at = (unary + block * 128).to(tl.pointer_type(tl.int32)) + row
    words = tl.load(at, mask=block * 1024 + row * 32 < nbits, other=0)
    return (words[:, None] >> tl.arange(0, 32)[None, :]) & 1, words


@triton.jit
def decode_bits(bits, words, fields, rank, count, k, v):
    """`(is a change, rank in the block, running position, value)` for each bit, `rank` ones having come before the
    block.

    The running position is the sum of what the bits up to and with this one add: a one its low bits + 1, a zero 2**k.
    A rank of `count` or more is no change: a wrong index cannot lead outside the fields.

    k = 1, v = 0, bits 0 1 1, fields 1 0: running positions 2 4 5, so changes at 3 and 4 after the block's position 0
    """
    column = tl.arange(0, 32)[None, :]
    ones = _popcount(words)
    before = tl.cumsum(ones, 0) - ones
    local = before[:, None] + _popcount(words[:, None] & ((1 << column) - 1))
    change = (bits == 1) & (rank + local < count)
    width = k + v
    start = rank * width
    offset = (start & 31).to(tl.int32) + local * width
    at = (fields + (start >> 5) * 4).to(tl.pointer_type(tl.uint32)) + (offset >> 5)
    low = tl.load(at, mask=change, other=0)
    high = tl.load(at + 1, mask=change, other=0)
    shift = (offset & 31).to(tl.uint32)
    field = (low >> shift) | ((high << 1) << (31 - shift))
    rest = (field & ((1 << k) - 1).to(tl.uint32)).to(tl.int32)
    value = ((field >> k.to(tl.uint32)) & ((1 << v) - 1).to(tl.uint32)).to(tl.int32)
    added = tl.where(change, rest + 1, 1 << k)
    rows = tl.sum(added, 1)
    running = tl.cumsum(added, 1) + (tl.cumsum(rows, 0) - rows)[:, None]
    return change, local, running, value


@triton.jit
def _popcount(word):
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)
