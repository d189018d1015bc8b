"""How many kernels a call launches, and which: never more for more tensors, and only what `configurations.py` lists."""

from __future__ import annotations

import numpy as np
import pytest
from gs01_blobs import encode_blob

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
    buffers,
    cast_segments,
    chain_digests,
    copy_segments,
    fingerprints,
    gather_tails,
    keep_old_words,
    overwrite_words,
    parse_blob,
    read_step_planes,
    restore_old_words,
    sparse_apply,
    sparse_check,
    sparse_revert,
    xor_block_sums,
    xor_segments,
    xor_words,
)

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

MANY = 20_000
SIZE = 300  # bytes of each tensor: over 240, a multiple of 4 and not of 16


@pytest.fixture
def launches(monkeypatch):
    """Takes CPU tensors for a device's and records `(kernel, constants, warps, programs)` instead of launching."""
    from gpusync_kernels import device
    from gpusync_kernels.device import adler32, cast, chain, configurations, copy, overwrite, planes, sparse, sums, xor
    from gpusync_kernels.device import sparse_check as check

    assert device is not None
    known = {
        (each.kernel.__name__, tuple(each.constants.items()), each.num_warps)
        for each in configurations.configurations()
    }
    made = []

    def record(kernel, programs, *tensors, num_warps=4, **constants):
        key = (kernel.__name__, tuple((name, int(value)) for name, value in constants.items()), num_warps)
        assert key in {(k, tuple((n, int(v)) for n, v in c), w) for k, c, w in known}, f"not listed: {key}"
        assert all(tensor.data_ptr() % 16 == 0 or tensor.numel() == 0 for tensor in tensors)
        if programs:
            made.append(kernel.__name__.strip("_"))

    for module in (adler32, cast, chain, copy, overwrite, planes, sparse, check, sums, xor):
        monkeypatch.setattr(module, "launch", record)
    as_device = lambda buffer: None if isinstance(buffer, np.ndarray) else torch.device("cpu")  # noqa: E731
    monkeypatch.setattr(buffers, "_device", as_device)
    return made


def packed(count: int) -> tuple[SegmentTable, torch.Tensor]:
    """`count` tensors as one destination buffer, 304 bytes apart: some aligned for vectors, most not."""
    every = np.arange(count)
    return SegmentTable.flat(dst_offset=304 * every, src=every, nbytes=SIZE), torch.zeros(
        304 * count, dtype=torch.uint8
    )


def run_all(count: int) -> None:
    """Every public operation over `count` tensors. Sources are slices of one tensor; numpy would take too long to
    make.
    """
    table, dst = packed(count)
    src = list(torch.zeros(count, 320, dtype=torch.uint8)[:, :SIZE].clone())
    moves = bind_moves(table, dst=[dst], src=src)
    copy_segments(moves)
    xor_segments(moves)
    old = np.zeros(50, np.uint16)
    for width in (1, 2, 4, 8):
        positions = torch.zeros(4, dtype=torch.int32 if width < 4 else torch.int64)
        words = torch.zeros(4 * width, dtype=torch.uint8)
        changes = [Change(source=i, positions=positions, words=words, old=words) for i in range(count)]
        whole = SegmentTable.flat(dst_offset=304 * np.arange(count), src=np.arange(count), nbytes=296)
        bound = bind_changes(whole, dst=[dst], changes=changes, element_bytes=width)
        for operation in (overwrite_words, xor_words, keep_old_words, restore_old_words):
            operation(bound)
    blob = np.frombuffer(encode_blob(old, old + np.uint16(1), order=0), np.uint8).copy()
    parsed, data = parse_blob(blob, blob.size), torch.from_numpy(blob)
    payloads = [Payload(source=i, data=data, blob=parsed) for i in range(count)]
    bound = bind_sparse(
        SegmentTable.flat(dst_offset=304 * np.arange(count), src=np.arange(count), nbytes=100),
        dst=[dst],
        payloads=payloads,
    )
    sparse_apply(bound)
    sparse_revert(bound)
    sparse_check(payloads)
    planes = bind_planes(table, dst=[dst], old=[dst], planes=[Planes(data=each, element_bytes=2) for each in src])
    apply_step_planes(planes)
    read_step_planes(planes)
    layout = SumsLayout.of(np.full(count, SIZE))
    sums = bind_sums(table, layout, dst=[dst], payload=src)
    sums.upload()
    chain_digests(layout, block_sums(sums), gather_tails(sums))
    xor_block_sums(sums)
    fingerprints(sums)
    adler32_partials(bind_adler32(table, np.full(count, SIZE), dst=[dst]))
    names = {"dst_dtypes": ["F32"], "src_dtypes": ["BF16"] * count}
    elements = SegmentTable.flat(dst_offset=76 * np.arange(count), src=np.arange(count), nbytes=75)
    cast_segments(bind_casts(elements, dst=[dst], src=src, **names))


def test_launches_do_not_grow_with_tensors(launches):
    run_all(100)
    few = list(launches)
    launches.clear()
    run_all(MANY)
    assert launches == few
    assert launches.count("copy_kernel") <= 3 + 2 * 3  # the copy itself, and the tails of digests and of fingerprints
    assert launches.count("sparse_kernel") == 2


def test_every_alignment_is_a_listed_configuration(launches):
    """Whole blocks, words, bytes, vectors and single elements, of every width: whatever a launcher can choose."""
    src = torch.zeros(70_000, dtype=torch.uint8)
    for phase in range(5):
        dst = torch.zeros(70_016, dtype=torch.uint8)[phase:]
        table = SegmentTable.flat(dst_offset=[0, 20_001], src_offset=[0, 30_000], nbytes=[20_000, 40_000])
        moves = bind_moves(table, dst=[dst], src=[src])
        copy_segments(moves)
        xor_segments(moves)
        sums = bind_sums(table, SumsLayout.of([70_000]), dst=[dst], payload=[src])
        block_sums(sums)
        xor_block_sums(sums)
        fingerprints(sums)
        adler32_partials(bind_adler32(table, [70_000], dst=[dst]))
    for width in (1, 2, 4, 8):
        aligned = SegmentTable.flat(nbytes=65_536)
        bound = bind_planes(
            aligned, dst=[src[:65_536]], old=[src[:65_536]], planes=[Planes(data=src[:65_536], element_bytes=width)]
        )
        apply_step_planes(bound)
        read_step_planes(bound)
    for source in ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"):
        for target in ("F32", "BF16", "F16"):
            names = {"dst_dtypes": [target], "src_dtypes": [source]}
            cast_segments(bind_casts(SegmentTable.flat(nbytes=1000), dst=[src], src=[src], **names))


def test_a_whole_model_is_bound_in_seconds():
    """20,000 segments on the host path: what the reference costs beyond the bytes it moves."""
    table, dst = packed(MANY)
    src = np.arange(MANY * SIZE, dtype=np.uint32).astype(np.uint8)
    flat = SegmentTable.flat(dst_offset=table.rows["dst_offset"], src_offset=SIZE * np.arange(MANY), nbytes=SIZE)
    copy_segments(bind_moves(flat, dst=[dst], src=[src]))
    assert np.array_equal(dst.numpy().reshape(MANY, 304)[:, :SIZE].reshape(-1), src)
    assert not dst.numpy().reshape(MANY, 304)[:, SIZE:].any()
