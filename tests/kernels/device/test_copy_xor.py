"""copy and xor on the device against their references."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import assert_same_bytes, extent, flat_cases, random_bytes, strided_cases

from gpusync_kernels import SegmentTable, bind_moves, copy_segments, xor_segments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("operation", [copy_segments, xor_segments])
@pytest.mark.parametrize("cases", [flat_cases, strided_cases])
def test_equals_the_reference(operation, cases, place):
    rng = np.random.default_rng(1)
    table = cases()
    dst = [random_bytes(rng, size) for size in extent(table, "dst")]
    src = [random_bytes(rng, size) for size in extent(table, "src")]
    on_device = [place(buffer) for buffer in dst]
    operation(bind_moves(table, dst=on_device, src=[place(buffer) for buffer in src]))
    operation(bind_moves(table, dst=dst, src=src))
    for i, (found, expected) in enumerate(zip(on_device, dst, strict=True)):
        assert_same_bytes(found.cpu().numpy(), expected, f"{operation.__name__} dst {i}")


@pytest.mark.parametrize("operation", [copy_segments, xor_segments])
def test_several_tensors_and_their_way_back(operation, place):
    """Live slices to a packed scratch and back, and a delta applied twice: the bytes are the old ones again."""
    rng = np.random.default_rng(2)
    live = [random_bytes(rng, 5000), random_bytes(rng, 3001)]
    on_device = [place(buffer) for buffer in live]
    held = SegmentTable.concat(
        [
            SegmentTable.flat(dst=[0, 1], dst_offset=[16, 1], src=[0, 1], src_offset=[160, 33], nbytes=[1600, 2999]),
            SegmentTable.strided(
                dst=0, dst_offset=2048, dst_stride=300, src=2, src_offset=64, src_stride=1024, rows=9, row_bytes=272
            ),
        ]
    )
    scratch_table, nbytes = held.packed()
    if operation is copy_segments:
        scratch = place(np.full(nbytes, 0xA5, np.uint8))
        save = scratch_table.moves_from(held)
        copy_segments(bind_moves(save, dst=[scratch], src=on_device))
        copy_segments(bind_moves(save.swapped(), dst=on_device, src=[scratch]))
    else:
        moves = bind_moves(held, dst=on_device, src=[place(random_bytes(rng, 20_000)) for _ in range(3)])
        xor_segments(moves)
        assert not np.array_equal(on_device[0].cpu().numpy(), live[0])
        xor_segments(moves)
    for found, expected in zip(on_device, live, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected)


@pytest.mark.parametrize("operation", [copy_segments, xor_segments])
def test_offsets_beyond_4_gib(operation, device):
    """Rows 2**31 + 16 bytes apart, in a buffer of which only a few pages are ever touched."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    stride, rows, row_bytes = (1 << 31) + 16, 3, 80
    nbytes = (rows - 1) * stride + row_bytes + 64
    sparse = (
        torch.from_numpy(np.zeros(nbytes, np.uint8))
        if device.type == "cpu"
        else torch.zeros(nbytes, dtype=torch.uint8, device=device)
    )
    payload = random_bytes(np.random.default_rng(3), rows * row_bytes)
    table = SegmentTable.strided(
        dst=0,
        dst_offset=16,
        dst_stride=stride,
        src=0,
        src_offset=0,
        src_stride=row_bytes,
        rows=rows,
        row_bytes=row_bytes,
    )
    operation(bind_moves(table, dst=[sparse], src=[torch.from_numpy(payload).to(device)]))
    for row in range(rows):
        at = 16 + row * stride
        around = sparse[at - 16 : at + row_bytes + 16].cpu().numpy()
        expected = np.concatenate(
            [np.zeros(16, np.uint8), payload[row * row_bytes :][:row_bytes], np.zeros(16, np.uint8)]
        )
        assert_same_bytes(around, expected, f"row {row}")


def test_a_flat_segment_beyond_4_gib(device):
    """The tile at 2**32 of one contiguous segment of 5 GiB, alone: its programs start 2**18 tiles late."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from gpusync_kernels.device.launch import launch, upload
    from gpusync_kernels.device.xor import _xor_kernel
    from gpusync_kernels.segments import merge_rows
    from gpusync_kernels.tiling import TILE_UNITS, address_rows, move_launch

    nbytes, at = (5 << 30) + 16, 1 << 32
    dst, src = (
        torch.from_numpy(np.zeros(nbytes, np.uint8))
        if device.type == "cpu"
        else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for _ in range(2)
    )
    payload = random_bytes(np.random.default_rng(4), 2 * TILE_UNITS * 16)
    src[at : at + payload.size] = torch.from_numpy(payload).to(device)
    rows = address_rows(
        SegmentTable.flat(nbytes=nbytes).rows, dst=np.array([dst.data_ptr()]), src=np.array([src.data_ptr()])
    )
    table = move_launch(merge_rows(rows), 16).table
    table[:, 6] = -(at // (TILE_UNITS * 16))
    pieces = upload(np.zeros(2, np.int32), device)
    launch(_xor_kernel, 2, upload(table, device), pieces, UNIT=16, TILE=TILE_UNITS)
    assert_same_bytes(dst[at - 16 : at].cpu().numpy(), np.zeros(16, np.uint8))
    assert_same_bytes(dst[at : at + payload.size].cpu().numpy(), payload)
    assert_same_bytes(dst[at + payload.size : at + payload.size + 16].cpu().numpy(), np.zeros(16, np.uint8))
