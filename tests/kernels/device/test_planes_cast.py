"""Byte planes and float conversions on the device against their references."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import assert_same_bytes, poisoned, random_bytes

from gpusync_kernels import (
    Planes,
    SegmentTable,
    apply_step_planes,
    bind_casts,
    bind_planes,
    cast_segments,
    read_full_planes,
    read_step_planes,
    restore_cast,
    revert_step_planes,
    write_full_planes,
)
from gpusync_kernels.cast import FORMATS, TARGETS

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 9, 1040


def tables(e: int) -> SegmentTable:
    """A [9, 1040] tensor whole (vectors), its columns 16..1023 (vectors) and 5..11 (single), and an odd flat part."""
    strided = {"src_stride": COLUMNS * e, "rows": ROWS}
    return SegmentTable.concat(
        [
            SegmentTable.flat(dst=0, src=0, nbytes=ROWS * COLUMNS * e),
            SegmentTable.strided(dst=1, dst_stride=1008 * e, src=1, src_offset=16 * e, row_bytes=1008 * e, **strided),
            SegmentTable.strided(dst=2, dst_stride=10 * e, src=1, src_offset=5 * e, row_bytes=7 * e, **strided),
            SegmentTable.flat(dst=2, dst_offset=1000 * e, src=2, src_offset=3 * e, nbytes=1501 * e),
        ]
    )


SIZES = (ROWS * COLUMNS, ROWS * 1008, 2600)
RAW = (ROWS * COLUMNS, ROWS * COLUMNS, 1511)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("e", [1, 2, 4, 8])
def test_planes(e, order, place):
    rng = np.random.default_rng(e)
    table = tables(e)
    live = [random_bytes(rng, size * e) for size in SIZES]
    raw = [random_bytes(rng, size * e) for size in RAW]
    host, there = [each.copy() for each in live], [place(each) for each in live]
    planes = [Planes(data=each, element_bytes=e, order=order) for each in raw]
    on_device = [Planes(data=place(each), element_bytes=e, order=order) for each in raw]
    bound, reference = bind_planes(table, dst=there, planes=on_device), bind_planes(table, dst=host, planes=planes)
    for operation in (apply_step_planes, revert_step_planes, write_full_planes):
        operation(bound)
        operation(reference)
        for found, expected in zip(there, host, strict=True):
            assert_same_bytes(found.cpu().numpy(), expected, operation.__name__)
        if operation is revert_step_planes:
            assert_same_bytes(np.concatenate(host), np.concatenate(live), "reverted")


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("e", [1, 2, 4, 8])
def test_planes_are_read(e, order, place):
    rng = np.random.default_rng(e)
    table = tables(e)
    new = [random_bytes(rng, size * e) for size in SIZES]
    old = [random_bytes(rng, size * e) for size in SIZES]
    raw = [poisoned(size * e) for size in RAW]
    there = [place(each) for each in raw]
    host = bind_planes(
        table, dst=new, old=old, planes=[Planes(data=each, element_bytes=e, order=order) for each in raw]
    )
    bound = bind_planes(
        table,
        dst=[place(each) for each in new],
        old=[place(each) for each in old],
        planes=[Planes(data=each, element_bytes=e, order=order) for each in there],
    )
    for operation in (read_step_planes, read_full_planes):
        operation(bound)
        operation(host)
        for found, expected in zip(there, raw, strict=True):
            assert_same_bytes(found.cpu().numpy(), expected, operation.__name__)


def words_of(dtype: str) -> np.ndarray:
    """Every bit pattern of 8 and 16 bits; for float32 the corners, and what lies around every float16 and bfloat16."""
    nbytes = FORMATS[dtype].nbytes
    if nbytes < 4:
        return np.arange(1 << 8 * nbytes, dtype=np.uint32).astype(f"<u{nbytes}")
    rng = np.random.default_rng(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near = np.concatenate([halves[::61], np.arange(0, 1 << 16, 41, dtype=np.uint32) << np.uint32(16)])
    ties = near[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001], np.uint32)
    return np.concatenate([ties.reshape(-1), rng.integers(0, 1 << 32, 4096, dtype=np.uint32)])


@pytest.mark.parametrize("dst_dtype", TARGETS)
@pytest.mark.parametrize("src_dtype", FORMATS)
def test_casts(src_dtype, dst_dtype, place):
    words = words_of(src_dtype)
    wide = FORMATS[dst_dtype].nbytes
    count = words.size // 16
    table = SegmentTable.concat(
        [
            SegmentTable.flat(dst=0, dst_offset=3, src_offset=0, nbytes=words.size),
            SegmentTable.strided(dst=1, dst_stride=9, src_offset=1, src_stride=16, rows=count - 1, row_bytes=7),
        ]
    )
    live = [poisoned((words.size + 5) * wide), poisoned(count * 9 * wide)]
    there, host = [place(each) for each in live], [each.copy() for each in live]
    names = {"dst_dtypes": [dst_dtype] * 2, "src_dtypes": [src_dtype]}
    sized = bind_casts(table, dst=host, src=[words], **names)
    kept, kept_there = poisoned(sized.old_bytes), place(poisoned(sized.old_bytes))
    reference = bind_casts(table, dst=host, src=[words], old=kept, **names)
    bound = bind_casts(table, dst=there, src=[place(words)], old=kept_there, **names)
    cast_segments(reference)
    cast_segments(bound)
    for found, expected in zip(there, host, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected, f"{src_dtype} to {dst_dtype}")
    assert_same_bytes(kept_there.cpu().numpy(), kept, "kept")
    restore_cast(bound)
    for found, expected in zip(there, live, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected, "restored")
