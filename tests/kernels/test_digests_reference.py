"""Block sums, chain, fingerprints and adler32 on the host, against xxhash and zlib, for any ownership of the bytes."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bytes, random_bytes

from gpusync_kernels import (
    Links,
    SegmentTable,
    SumsLayout,
    add_words,
    adler32_checksums,
    adler32_partials,
    advance,
    bind_adler32,
    bind_moves,
    bind_sums,
    block_sums,
    chain_digests,
    copy_segments,
    fingerprints,
    gather_tails,
    hex_digests,
    xor_block_sums,
)
from gpusync_kernels.segments import SEGMENT
from gpusync_kernels.sums import BoundSums
from gpusync_kernels.xxh3 import BLOCK_BYTES, START, STRIPE_KEYS

SIZES = (*range(241, 300), 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 5000, 262_144, 262_145, 300_007)


def whole(sizes) -> SegmentTable:
    every = np.arange(len(sizes))
    return SegmentTable.flat(dst=every, src=every, nbytes=np.array(sizes))


def combined(layout: SumsLayout, owners: list[BoundSums]) -> list[str]:
    """The digests from several owners' parts: sums and tails added, cut words put together from their bytes first."""
    sums, tails = owners[0].zeros(), np.zeros((len(layout), 64), np.uint8)
    words: dict[tuple[int, int], bytearray] = {}
    for bound in owners:
        sums += block_sums(bound)
        tails += gather_tails(bound)
        for dst, offset, stride, tensor, position, step, rows, row_bytes in bound.pieces.cut.tolist():
            for row in range(rows):
                for byte in range(row_bytes):
                    at = position + row * step + byte
                    word = words.setdefault((tensor, at // 8), bytearray(8))
                    word[at % 8] = bound.dst[dst].reshape(-1).view(np.uint8)[offset + row * stride + byte]
    for (tensor, word), data in words.items():
        add_words(sums, layout, tensor, [word], np.frombuffer(data, np.uint64))
    return hex_digests(chain_digests(layout, sums, tails))


def test_whole_tensors_equal_the_library():
    rng = np.random.default_rng(0)
    tensors = [random_bytes(rng, size) for size in SIZES]
    layout = SumsLayout.of(SIZES)
    bound = bind_sums(whole(SIZES), layout, dst=tensors)
    expected = [xxhash.xxh3_128_hexdigest(tensor) for tensor in tensors]
    assert hex_digests(chain_digests(layout, block_sums(bound), gather_tails(bound))) == expected
    assert hex_digests(fingerprints(bound)) == expected


@settings(max_examples=60)
@given(st.data())
def test_any_ownership_gives_the_digest(data):
    """Columns and rows of two tensors dealt to three owners at random widths, odd ones too."""
    owners: list[list[tuple[int, ...]]] = [[], [], []]
    tensors, buffers = [], [[], [], []]
    for number in range(2):
        rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(241, 2500))
        tensor = random_bytes(np.random.default_rng(data.draw(st.integers(0, 99))), rows * columns)
        tensors.append(tensor)
        cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=4))})
        for start, stop in itertools.pairwise(cuts):
            owner = data.draw(st.integers(0, 2))
            part = np.ascontiguousarray(tensor.reshape(rows, columns)[:, start:stop])
            size = stop - start
            owners[owner].append((len(buffers[owner]), 0, size, number, start, columns, rows, size))
            buffers[owner].append(part)
    sizes = [tensor.size for tensor in tensors]
    layout = SumsLayout.of(sizes)
    bound = [
        bind_sums(SegmentTable(np.array(rows, SEGMENT).reshape(-1)), layout, dst=held)
        for rows, held in zip(owners, buffers, strict=True)
    ]
    assert combined(layout, bound) == [xxhash.xxh3_128_hexdigest(tensor) for tensor in tensors]
    total = sum(
        adler32_partials(bind_adler32(SegmentTable(np.array(rows, SEGMENT).reshape(-1)), sizes, dst=held))
        for rows, held in zip(owners, buffers, strict=True)
    )
    assert adler32_checksums(sizes, total).tolist() == [zlib.adler32(tensor) for tensor in tensors]


@settings(max_examples=40)
@given(st.integers(241, 9000), st.data())
def test_a_fingerprint_sees_every_byte_it_holds_and_no_other(size, data):
    """One byte flipped anywhere in the slice changes it; the layout of the bytes in memory does not."""
    start = data.draw(st.integers(0, size - 1))
    nbytes = data.draw(st.integers(1, size - start))
    held = random_bytes(np.random.default_rng(size), nbytes)
    layout = SumsLayout.of([size])
    before = fingerprints(bind_sums(SegmentTable.flat(src_offset=start, nbytes=nbytes), layout, dst=[held]))
    elsewhere = np.concatenate([np.zeros(5, np.uint8), held])
    moved = SegmentTable.flat(dst_offset=5, src_offset=start, nbytes=nbytes)
    assert_same_bytes(fingerprints(bind_sums(moved, layout, dst=[elsewhere])), before)
    held[data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = fingerprints(bind_sums(SegmentTable.flat(src_offset=start, nbytes=nbytes), layout, dst=[held]))
    assert not np.array_equal(before, after)


@pytest.mark.parametrize(("offset", "row_bytes"), [(0, 5), (3, 16), (0, 16), (1, 1)])
def test_a_fingerprint_does_not_depend_on_where_rows_lie(offset, row_bytes):
    """Rows that touch in the tensor, and in a packed scratch, but not in the live buffer."""
    size = 60 * row_bytes + 300
    live = random_bytes(np.random.default_rng(6), 60 * (row_bytes + 3))
    table = SegmentTable.strided(
        dst_stride=row_bytes + 3, src_offset=offset, src_stride=row_bytes, rows=60, row_bytes=row_bytes
    )
    packed, nbytes = table.packed()
    scratch = np.zeros(nbytes, np.uint8)
    copy_segments(bind_moves(packed.moves_from(table), dst=[scratch], src=[live]))
    layout = SumsLayout.of([size])
    found, expected = (bind_sums(each, layout, dst=[data]) for each, data in ((packed, scratch), (table, live)))
    assert_same_bytes(fingerprints(found), fingerprints(expected))


def test_one_sum_by_hand():
    """One block of zeros but for a word in stripe 0, lane 2: as the kernel's docstring says."""
    mask, word = (1 << 32) - 1, 0x1234_5678_9ABC_DEF0
    product = lambda key: (key & mask) * (key >> 32)  # noqa: E731
    keys = [[int(key) for key in stripe] for stripe in STRIPE_KEYS]
    expected = [sum(product(keys[stripe][lane]) for stripe in range(16)) for lane in range(8)]
    expected[2] += product(word ^ keys[0][2]) - product(keys[0][2])
    expected[3] += word
    block = np.zeros(2 * BLOCK_BYTES, np.uint8)
    block[16:24] = np.array([word], np.uint64).view(np.uint8)
    sums = block_sums(bind_sums(whole([block.size]), SumsLayout.of([block.size]), dst=[block]))
    assert sums[0].tolist() == [value % (1 << 64) for value in expected]


def test_the_layout_of_the_docstring():
    layout = SumsLayout.of([241, 3000])
    assert (layout.blocks.tolist(), layout.first_row.tolist(), layout.rows, layout.allocated_rows) == (
        [0, 2],
        [0, 1],
        4,
        20,
    )
    assert layout.words.tolist() == [24, 368]


def test_short_tensors_are_refused():
    with pytest.raises(ValueError, match="tensor 1 has 240 bytes; the block form begins at 241"):
        SumsLayout.of([241, 240])


def test_accumulators_are_passed_on():
    tensor = random_bytes(np.random.default_rng(3), 100 * 1024 + 77)
    layout = SumsLayout.of([tensor.size])
    bound = bind_sums(whole([tensor.size]), layout, dst=[tensor])
    sums = block_sums(bound)
    lanes, at = START[None], 0
    for stop in (1, 17, 60):
        lanes, at = advance(layout, sums, Links(lanes, np.array([at]), np.array([stop]))), stop
    digests = chain_digests(layout, sums, gather_tails(bound), Links(lanes, np.array([at]), layout.blocks))
    assert hex_digests(digests) == [xxhash.xxh3_128_hexdigest(tensor)]


def test_windows_of_a_payload():
    """A delta decoded in windows of 3,000 bytes, applied window by window: the sums of the whole new tensor."""
    rng = np.random.default_rng(4)
    old, payload = random_bytes(rng, 10_001), random_bytes(rng, 10_001)
    layout, live, table = SumsLayout.of([old.size]), old.copy(), whole([old.size])
    sums = None
    for start in range(0, old.size, 3072):
        part = table.clipped(start, start + 3072)
        bound = bind_sums(part, layout, dst=[live], payload=[payload[start : start + 3072]], payload_start=start)
        sums = xor_block_sums(bound, sums)
    assert_same_bytes(live, old ^ payload)
    digests = chain_digests(layout, sums, gather_tails(bind_sums(table, layout, dst=[live])))
    assert hex_digests(digests) == [xxhash.xxh3_128_hexdigest(old ^ payload)]
    with pytest.raises(ValueError, match="no payload was bound"):
        xor_block_sums(bind_sums(table, layout, dst=[live]))


@pytest.mark.parametrize("size", [0, 1, 5551, 5552, 65_536, 65_537, 1_000_003])
def test_adler32_equals_the_library(size):
    for tensor in (random_bytes(np.random.default_rng(size), size), np.full(size, 255, np.uint8)):
        partials = adler32_partials(bind_adler32(whole([size]), [size], dst=[tensor]))
        assert adler32_checksums([size], partials).tolist() == [zlib.adler32(tensor)]


def test_a_position_beyond_4_gib():
    """A slice at 2**40 of a larger tensor: the sums of its blocks do not depend on where they are, adler32 does."""
    held = random_bytes(np.random.default_rng(5), 4096)
    at, size = 1 << 40, (1 << 40) + 8192
    layout = SumsLayout(
        *(np.array([value]) for value in (size, (size - 1) // 1024, (size - 1) // 64 * 8, -(at // 1024))), rows=4
    )
    table = SegmentTable.flat(src_offset=at, nbytes=4096)
    sums = block_sums(bind_sums(table, layout, dst=[held]))
    expected = block_sums(bind_sums(whole([5000]), SumsLayout.of([5000]), dst=[np.concatenate([held, held[:904]])]))
    assert_same_bytes(sums[:4], expected[:4])
    weights = size - at - np.arange(4096)
    partials = adler32_partials(bind_adler32(table, [size], dst=[held]))
    assert partials.tolist() == [[int(held.sum()) % 65521, int((weights * held).sum()) % 65521]]
