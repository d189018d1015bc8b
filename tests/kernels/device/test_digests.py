"""Block sums, chain, fingerprints and adler32 on the device, against the references and against the libraries."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
import xxhash
from kernel_cases import assert_same_bytes, random_bytes

from gpusync_kernels import (
    Links,
    SegmentTable,
    SumsLayout,
    adler32_checksums,
    adler32_partials,
    advance,
    bind_adler32,
    bind_sums,
    block_sums,
    chain_digests,
    fingerprints,
    gather_tails,
    hex_digests,
    xor_block_sums,
)
from gpusync_kernels.xxh3 import START

pytestmark = pytest.mark.gpu

# the shortest block form, a stripe -1 / 0 / +1 around blocks, one block to three, a tile of 32 blocks and a little, odd
SIZES = (241, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 3072, 32768, 32769, 40_007)


def whole(sizes) -> SegmentTable:
    every = np.arange(len(sizes))
    return SegmentTable.flat(dst=every, src=every, nbytes=np.array(sizes))


def split_in_three(rows: int, columns: int) -> list[SegmentTable]:
    """A [rows, columns] tensor of bytes over three owners: columns [0, a), [a, b), [b, columns), each packed."""
    cuts = (0, columns // 4, columns // 4 + columns // 3, columns)
    return [
        SegmentTable.strided(
            dst=0,
            dst_offset=0,
            dst_stride=stop - start,
            src=0,
            src_offset=start,
            src_stride=columns,
            rows=rows,
            row_bytes=stop - start,
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def slice_of(tensor: np.ndarray, table: SegmentTable) -> np.ndarray:
    row = table.rows[0]
    view = tensor.reshape(int(row["rows"]), int(row["src_stride"]))
    return np.ascontiguousarray(view[:, row["src_offset"] : row["src_offset"] + row["row_bytes"]]).reshape(-1)


@pytest.mark.parametrize("phase", [0, 8, 3])
def test_whole_tensors_equal_the_library(phase, place):
    """At addresses that are multiples of 16 (vectors), of 8 (words) and odd (bytes)."""
    rng = np.random.default_rng(phase)
    tensors = [random_bytes(rng, size) for size in SIZES]
    buffers = [place(tensor, phase) for tensor in tensors]
    table = whole(SIZES)
    layout = SumsLayout.of(SIZES)
    bound = bind_sums(table, layout, dst=buffers)
    digests = hex_digests(chain_digests(layout, block_sums(bound), gather_tails(bound)))
    assert digests == [xxhash.xxh3_128_hexdigest(tensor) for tensor in tensors]


@pytest.mark.parametrize("phase", [0, 4])
def test_fused_xor(phase, place):
    """The payload's window begins at byte 1024 of each tensor, at an address that is, or is not, a multiple of 16."""
    rng = np.random.default_rng(5)
    sizes = [size for size in SIZES if size > 1100]
    old = [random_bytes(rng, size) for size in sizes]
    payload = [random_bytes(rng, size - 1024 + phase) for size in sizes]
    layout = SumsLayout.of(sizes)
    buffers = [place(tensor, 0) for tensor in old]
    every = np.arange(len(sizes))
    table = SegmentTable.flat(dst=every, dst_offset=1024, src=every, src_offset=1024, nbytes=np.array(sizes) - 1024)
    head = SegmentTable.flat(dst=every, src=every, nbytes=1024)
    sums = block_sums(bind_sums(head, layout, dst=buffers))
    windows = [place(data, 0)[phase:] for data in payload]
    sums = xor_block_sums(bind_sums(table, layout, dst=buffers, payload=windows, payload_start=1024), sums)
    new = [np.concatenate([o[:1024], o[1024:] ^ p[phase:]]) for o, p in zip(old, payload, strict=True)]
    for found, expected in zip(buffers, new, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected)
    tails = gather_tails(bind_sums(whole(sizes), layout, dst=buffers))
    digests = hex_digests(chain_digests(layout, sums, tails))
    assert digests == [xxhash.xxh3_128_hexdigest(tensor) for tensor in new]


@pytest.mark.parametrize(("rows", "columns"), [(12, 4096), (30, 1000), (37, 192), (3, 85), (3, 3001)])
def test_slices_equal_the_reference(rows, columns, place):
    """Column slices: whole blocks a row, partial blocks, several rows a block, odd widths (cut words)."""
    tensor = random_bytes(np.random.default_rng(6), rows * columns)
    layout = SumsLayout.of([tensor.size])
    for table in split_in_three(rows, columns):
        held = slice_of(tensor, table)
        bound, reference = bind_sums(table, layout, dst=[place(held)]), bind_sums(table, layout, dst=[held])
        sums, expected = block_sums(bound), block_sums(reference)
        assert_same_bytes(sums.cpu().numpy(), expected, "sums")
        assert_same_bytes(gather_tails(bound).cpu().numpy(), gather_tails(reference), "tails")
        found = fingerprints(bound, sums)
        assert_same_bytes(found, fingerprints(reference, expected), "fingerprints")
        assert_same_bytes(sums.cpu().numpy(), expected, "sums with cut words")


def test_accumulators_are_passed_on(place):
    """Three owners of contiguous blocks: each advances what it was given; the last makes the digest."""
    rng = np.random.default_rng(7)
    sizes = [40 * 1024 + 5, 20 * 1024]
    tensors = [random_bytes(rng, size) for size in sizes]
    layout = SumsLayout.of(sizes)
    bound = bind_sums(whole(sizes), layout, dst=[place(tensor) for tensor in tensors])
    sums = block_sums(bound)
    lanes, at = np.tile(START, (2, 1)), np.array([0, 0])
    for stop in (np.array([17, 1]), np.array([33, 1])):
        lanes, at = advance(layout, sums, Links(lanes, at, stop)), stop
    digests = chain_digests(layout, sums, gather_tails(bound), Links(lanes, at, layout.blocks))
    assert hex_digests(digests) == [xxhash.xxh3_128_hexdigest(tensor) for tensor in tensors]


@pytest.mark.parametrize(("rows", "columns"), [(24, 4096), (37, 192), (60, 45), (3, 30_001)])
def test_adler32_adds_up(rows, columns, place):
    tensor = random_bytes(np.random.default_rng(8), rows * columns)
    tensor[: tensor.size // 2] = 255
    total = np.zeros((1, 2), np.int64)
    for table in split_in_three(rows, columns):
        held = slice_of(tensor, table)
        found = adler32_partials(bind_adler32(table, [tensor.size], dst=[place(held)]))
        assert_same_bytes(found, adler32_partials(bind_adler32(table, [tensor.size], dst=[held])), "partials")
        total += found
    assert adler32_checksums([tensor.size], total).tolist() == [zlib.adler32(tensor)]


def test_adler32_of_whole_tensors(place):
    rng = np.random.default_rng(9)
    sizes = (1, 63, 4095, 4096, 4097, 12_289)
    tensors = [random_bytes(rng, size) for size in sizes]
    found = adler32_partials(bind_adler32(whole(sizes), sizes, dst=[place(tensor) for tensor in tensors]))
    assert adler32_checksums(sizes, found).tolist() == [zlib.adler32(tensor) for tensor in tensors]


def test_positions_beyond_4_gib(place):
    """One row of 3 KiB at position 2**40 - 4096 of a tensor of 2**40 bytes: only sums of its own blocks are made."""
    from gpusync_kernels.sums import BoundSums

    held = random_bytes(np.random.default_rng(10), 3072)
    at = (1 << 40) - 4096
    full = SumsLayout.of([1 << 40])
    near = SumsLayout(full.nbytes, full.blocks, full.words, np.array([-(at // 1024)]), 4)
    table = SegmentTable.flat(src_offset=at, nbytes=3072)
    sums = block_sums(BoundSums(table, near, dst=[place(held)])).cpu().numpy()
    expected = block_sums(bind_sums(SegmentTable.flat(nbytes=3072), SumsLayout.of([4096]), dst=[held]))
    assert_same_bytes(sums[:3], expected[:3])
    weights = (1 << 40) - at - np.arange(3072)
    partials = adler32_partials(bind_adler32(table, [1 << 40], dst=[place(held)]))
    assert partials.tolist() == [[int(held.sum()) % 65521, int((weights * held).sum()) % 65521]]
