"""The worked example at the end of every kernel's docstring, run as it stands there."""

from __future__ import annotations

import numpy as np
import pytest
from gs01_blobs import encode_blob, encode_twice

from gpusync_kernels import (
    Change,
    Payload,
    Planes,
    SegmentTable,
    SumsLayout,
    adler32_partials,
    apply_step_planes,
    bind_adler32,
    bind_casts,
    bind_changes,
    bind_moves,
    bind_planes,
    bind_sparse,
    bind_sums,
    block_sums,
    cast_segments,
    copy_segments,
    overwrite_words,
    parse_blob,
    read_step_planes,
    sparse_apply,
    sparse_check,
    xor_segments,
)
from gpusync_kernels.sums import add_cut_words
from gpusync_kernels.xxh3 import STRIPE_KEYS

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

pytestmark = pytest.mark.gpu

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def read(tensor, dtype=np.uint8) -> list[int]:
    return tensor.cpu().numpy().view(dtype).tolist()


def test_copy(place):
    dst, src = place(np.zeros(4, np.uint8)), place(np.array([1, 2, 9, 3, 4, 9], np.uint8))
    table = SegmentTable.strided(dst_stride=2, src_stride=3, rows=2, row_bytes=2)
    copy_segments(bind_moves(table, dst=[dst], src=[src]))
    assert read(dst) == [1, 2, 3, 4]


def test_xor(place):
    dst, src = place(np.array([1, 2, 3, 4], np.uint8)), place(np.ones(4, np.uint8))
    xor_segments(bind_moves(SegmentTable.flat(nbytes=4), dst=[dst], src=[src]))
    assert read(dst) == [0, 3, 2, 5]


def test_changes(place):
    dst = place(np.zeros(4, np.uint8))
    positions = place(np.array([5, 1, 7], np.uint32)).view(torch.int32)
    change = Change(source=0, positions=positions, words=place(np.array([50, 10, 70], np.uint8)))
    overwrite_words(bind_changes(SegmentTable.flat(src_offset=4, nbytes=4), dst=[dst], changes=[change]))
    assert read(dst) == [0, 50, 0, 70]


def test_sparse(place):
    old = np.array([7, 7, 7, 1], np.uint16)
    blob = np.frombuffer(encode_blob(old, np.array([7, 7, 7, 0x8000], np.uint16), order=1), np.uint8)
    dst, payload = place(old), Payload(source=0, data=place(blob), blob=parse_blob(blob, blob.size))
    sparse_apply(bind_sparse(SegmentTable.flat(nbytes=8), dst=[dst], payloads=[payload]))
    assert read(dst, np.uint16) == [7, 7, 7, 0x8000]


def test_sparse_check(place):
    old = np.zeros(8, np.uint16)
    new = old.copy()
    new[5] = 1
    blob = np.frombuffer(encode_twice(old, new), np.uint8)
    assert sparse_check([Payload(source=0, data=place(blob), blob=parse_blob(blob, blob.size))]).tolist() == [False]


def test_planes(place):
    table = SegmentTable.flat(nbytes=4)
    dst, planes = place(np.array([5, 5], np.uint16)), place(np.array([2, 3, 0, 0], np.uint8))
    apply_step_planes(bind_planes(table, dst=[dst], planes=[Planes(data=planes, element_bytes=2)]))
    assert read(dst, np.uint16) == [6, 3]
    old, raw = place(np.array([5, 5], np.uint16)), place(np.zeros(4, np.uint8))
    read_step_planes(bind_planes(table, dst=[dst], old=[old], planes=[Planes(data=raw, element_bytes=2)]))
    assert read(raw) == [2, 3, 0, 0]


def test_block_sums(place):
    word, keys = 0x1234_5678_9ABC_DEF0, [[int(key) for key in stripe] for stripe in STRIPE_KEYS]
    expected = [sum((keys[s][i] & MASK32) * (keys[s][i] >> 32) for s in range(16)) for i in range(8)]
    block, layout = np.zeros(1025, np.uint8), SumsLayout.of([1025])
    table = SegmentTable.flat(nbytes=1025)
    sums = block_sums(bind_sums(table, layout, dst=[place(block)])).cpu().numpy().view(np.uint64)
    assert sums[0].tolist() == [value & MASK64 for value in expected]
    key = keys[0][2]
    expected[2] += ((word ^ key) & MASK32) * ((word ^ key) >> 32) - (key & MASK32) * (key >> 32)
    expected[3] += word
    block[16:24] = np.array([word], np.uint64).view(np.uint8)
    sums = block_sums(bind_sums(table, layout, dst=[place(block)])).cpu().numpy().view(np.uint64)
    assert sums[0].tolist() == [value & MASK64 for value in expected]


def test_word_sums(place):
    bound = bind_sums(
        SegmentTable.flat(src_offset=14, nbytes=3), SumsLayout.of([300]), dst=[place(np.array([1, 2, 3], np.uint8))]
    )
    sums = block_sums(bound)
    assert not sums.any()
    add_cut_words(bound, sums)
    expected = [0] * 8
    for lane, word in ((1, 0x0201 << 48), (2, 3)):
        key = word ^ int(STRIPE_KEYS[0, lane])
        expected[lane] += (key & MASK32) * (key >> 32)
        expected[lane ^ 1] += word
    assert sums.cpu().numpy().view(np.uint64)[0].tolist() == [value & MASK64 for value in expected]


def test_chain_step(device):
    from gpusync_kernels.device.chain import _step

    @triton.jit
    def one_step(values, _step: tl.constexpr):
        acc = tl.load(values).to(tl.uint64, bitcast=True)
        key = tl.load(values + 2).to(tl.uint64, bitcast=True)
        tl.store(values, _step(acc, tl.load(values + 1), key).to(tl.int64, bitcast=True))

    values = torch.tensor([1, 2, 0], device=device)
    one_step[(1,)](values, _step)
    assert values[0].item() == 0x1DAA66D13


def test_adler32(place):
    table = SegmentTable.flat(src_offset=4, nbytes=3)
    assert adler32_partials(bind_adler32(table, [10], dst=[place(np.array([1, 2, 3], np.uint8))])).tolist() == [[6, 28]]


def test_cast(place):
    dst, src = place(np.zeros(2, np.uint32)), place(np.array([0x3F80, 0x8000], np.uint16))
    names = {"dst_dtypes": ["F32"], "src_dtypes": ["BF16"]}
    cast_segments(bind_casts(SegmentTable.flat(nbytes=2), dst=[dst], src=[src], **names))
    assert read(dst, np.uint32) == [0x3F800000, 0x80000000]


def test_pointer_helpers(device):
    """`rows_of`, `place`, `_swap_lanes` and `decode_bits`, as their docstrings say."""
    from gpusync_kernels.device.gs01 import decode_bits, read_unary
    from gpusync_kernels.device.sums import _swap_lanes
    from gpusync_kernels.device.tiles import place, rows_of

    @triton.jit
    def rows_example(numbers, out, rows_of: tl.constexpr):
        row, unit = rows_of(tl.load(numbers), tl.load(numbers + 1), 4)
        tl.store(out + tl.arange(0, 4), row)
        tl.store(out + 4 + tl.arange(0, 4), unit)

    @triton.jit
    def place_example(numbers, out, place: tl.constexpr, WIDE: tl.constexpr):
        offset = tl.load(numbers + 4 + tl.arange(0, 8))
        held, at = place(
            offset, tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3), 1, WIDE
        )
        tl.store(out + tl.arange(0, 8), tl.where(held, at, -1))

    @triton.jit
    def swap_example(out, _swap_lanes: tl.constexpr):
        lanes = tl.arange(0, 8)[None, :] + tl.zeros((2, 8), tl.int32)
        tl.store(out + tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :], _swap_lanes(lanes, 2).to(tl.int64))

    out = torch.zeros(16, dtype=torch.int64, device=device)
    rows_example[(1,)](torch.tensor([7, 3], device=device), out, rows_of)
    assert out[:8].tolist() == [2, 2, 3, 3, 1, 2, 0, 1]
    for wide in (False, True):
        numbers = torch.tensor([2, 2, 6, 2, 0, 1, 2, 6, 7, 8, 12, 99], device=device)
        place_example[(1,)](numbers, out, place, wide)
        assert out[:8].tolist() == [0, 1, -1, 2, 3, -1, -1, -1]
    swap_example[(1,)](out, _swap_lanes)
    assert out.tolist() == [1, 0, 3, 2, 5, 4, 7, 6] * 2

    @triton.jit
    def decode_example(numbers, out, read_unary: tl.constexpr, decode_bits: tl.constexpr):
        unary, fields = tl.load(numbers), tl.load(numbers + 1)
        k, v = tl.load(numbers + 2).to(tl.int32), tl.load(numbers + 3).to(tl.int32)
        bits, words = read_unary(unary, tl.load(numbers + 4), 3)
        change, _local, running, _value = decode_bits(bits, words, fields, tl.load(numbers + 4), 2, k, v)
        at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + at, tl.where(change, running, 0).to(tl.int64))

    unary = torch.tensor([0b110, 0], dtype=torch.int32, device=device)
    fields = torch.tensor([0b01, 0, 0], dtype=torch.int32, device=device)
    out = torch.zeros(1024, dtype=torch.int64, device=device)
    numbers = torch.tensor([unary.data_ptr(), fields.data_ptr(), 1, 0, 0], device=device)
    decode_example[(1,)](numbers, out, read_unary, decode_bits)
    assert out[:4].tolist() == [0, 4, 5, 0]
