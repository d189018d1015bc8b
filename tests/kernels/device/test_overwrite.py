"""Scatter and gather of words on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import assert_same_bytes, poisoned, random_bytes

from gpusync_kernels import (
    Change,
    SegmentTable,
    bind_changes,
    keep_old_words,
    overwrite_words,
    restore_old_words,
    xor_words,
)

pytestmark = pytest.mark.gpu

ELEMENTS = 60 * 70


def placements(element_bytes: int) -> SegmentTable:
    """Tensor 0 [60, 70] as its columns 10..39 and, apart, 64..69; tensor 1 whole; tensor 2 in two flat parts."""
    e = element_bytes
    return SegmentTable.concat(
        [
            SegmentTable.strided(
                dst=0,
                dst_offset=8,
                dst_stride=32 * e,
                src=0,
                src_offset=10 * e,
                src_stride=70 * e,
                rows=60,
                row_bytes=30 * e,
            ),
            SegmentTable.strided(
                dst=1,
                dst_offset=0,
                dst_stride=6 * e,
                src=0,
                src_offset=64 * e,
                src_stride=70 * e,
                rows=60,
                row_bytes=6 * e,
            ),
            SegmentTable.flat(dst=2, src=1, nbytes=ELEMENTS * e),
            SegmentTable.flat(dst=3, dst_offset=[0, 4096], src=2, src_offset=[0, 2000 * e], nbytes=[100 * e, 300 * e]),
        ]
    )


def changes(rng, element_bytes, position_dtype):
    """None, one and many positions, in any order, and a second change of a source, in a window that begins later."""
    made = []
    for source, count, first, stop in (
        (0, 2000, 0, 4200),
        (1, 1, 0, 1000),
        (2, 1025, 0, 4200),
        (1, 700, 1000, 4200),
        (0, 0, 0, 1),
    ):
        positions = rng.permutation(stop - first)[:count].astype(position_dtype)
        words = random_bytes(rng, count * element_bytes)
        old = poisoned(count * element_bytes)
        made.append(Change(source=source, positions=positions, words=words, old=old, first_element=first))
    return made


def on(place, change):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    wide = torch.int64 if change.positions.itemsize == 8 else torch.int32
    return Change(
        source=change.source,
        positions=place(change.positions).view(wide),
        words=place(change.words),
        old=place(change.old),
        first_element=change.first_element,
    )


def aligned(array: np.ndarray) -> np.ndarray:
    """The same bytes at an address that is a multiple of 16."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    room[start : start + array.nbytes] = array.view(np.uint8)
    return room[start : start + array.nbytes].view(array.dtype)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("position_dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("operation", [overwrite_words, xor_words])
def test_equals_the_reference_and_is_undone(operation, position_dtype, element_bytes, place):
    rng = np.random.default_rng(element_bytes)
    table = placements(element_bytes)
    sizes = (8 + 60 * 32 * element_bytes, 360 * element_bytes, ELEMENTS * element_bytes, 4096 + 300 * element_bytes)
    live = [aligned(random_bytes(rng, size)) for size in sizes]
    made = [
        Change(
            source=c.source,
            positions=aligned(c.positions),
            words=aligned(c.words),
            old=aligned(c.old),
            first_element=c.first_element,
        )
        for c in changes(rng, element_bytes, position_dtype)
    ]
    expected = [buffer.copy() for buffer in live]
    reference = bind_changes(table, dst=expected, changes=made, element_bytes=element_bytes)
    buffers, there = [place(buffer) for buffer in live], [on(place, change) for change in made]
    bound = bind_changes(table, dst=buffers, changes=there, element_bytes=element_bytes)
    keep_old_words(reference)
    keep_old_words(bound)
    for found, change in zip(there, made, strict=True):
        assert_same_bytes(found.old.cpu().numpy(), change.old, "old words")
    operation(reference)
    operation(bound)
    for found, wanted in zip(buffers, expected, strict=True):
        assert_same_bytes(found.cpu().numpy(), wanted, "changed")
    restore_old_words(bound)
    for found, wanted in zip(buffers, live, strict=True):
        assert_same_bytes(found.cpu().numpy(), wanted, "undone")


@pytest.mark.parametrize("first_element", [(1 << 32) + 5, 1 << 40])
def test_positions_beyond_4_gib(first_element, place):
    """A slice of a tensor of terabytes: positions of a window that begins beyond 2**32, rows of 2**30 elements."""
    stride, rows = 1 << 30, 3
    start = first_element - 7
    table = SegmentTable.strided(
        dst_offset=0, dst_stride=64, src_offset=start, src_stride=stride, rows=rows, row_bytes=64
    )
    live = random_bytes(np.random.default_rng(12), 64 * rows)
    positions = np.array([0, 30, 56, 57, stride, stride + 1, 2 * stride, 2 * stride + 57], np.uint32)
    words = np.arange(1, 9, dtype=np.uint8)
    expected = live.copy()
    for position, word in zip(positions.tolist(), words.tolist(), strict=True):
        row, column = divmod(position + 7, stride)
        if column < 64:
            expected[64 * row + column] = word
    buffer = place(live)
    there = Change(
        source=0,
        positions=place(positions).view(pytest.importorskip("torch", reason="torch is not installed").int32),
        words=place(words),
        first_element=first_element,
    )
    overwrite_words(bind_changes(table, dst=[buffer], changes=[there]))
    assert_same_bytes(buffer.cpu().numpy(), expected)
    host = live.copy()
    overwrite_words(
        bind_changes(
            table,
            dst=[host],
            changes=[Change(source=0, positions=positions, words=words, first_element=first_element)],
        )
    )
    assert_same_bytes(host, expected)
