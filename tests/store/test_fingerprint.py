"""Fingerprints on the host: what a checksum tells of them, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from gpusync.digest import digest_of
from gpusync.store import fingerprint
from gpusync.store.fingerprint import bind_fingerprints, known_fingerprints, without
from gpusync.store.memory import HostMemory
from gpusync_kernels import SegmentTable

NBYTES = np.array([1000, 1000, 1000], np.int64)
TENSORS = [np.random.default_rng(number).integers(0, 256, 1000, dtype=np.uint8) for number in range(3)]
CHECKSUMS = [digest_of("xxh3-128", tensor) for tensor in TENSORS]


def flat(*pieces: tuple[int, int, int]) -> SegmentTable:
    """(tensor, offset, bytes) of each piece, which lies where it lies in its tensor."""
    src, offset, nbytes = np.array(pieces).T
    return SegmentTable.flat(dst=src, dst_offset=offset, src=src, src_offset=offset, nbytes=nbytes)


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (flat((0, 0, 1000), (2, 0, 1000)), {0, 2}),
        (flat((1, 0, 400), (1, 400, 600)), {1}),
        (flat((1, 400, 600), (1, 0, 400)), set()),  # digested in this order
        (flat((0, 0, 999)), set()),
        (flat((0, 1, 999)), set()),
        (flat((0, 0, 400), (0, 500, 500)), set()),
        (SegmentTable.strided(dst_stride=20, src_stride=10, rows=100, row_bytes=10), set()),
        (SegmentTable.strided(dst_stride=10, src_stride=10, rows=100, row_bytes=10), {0}),
    ],
)
def test_the_checksum_of_a_tensor_held_whole_is_its_fingerprint(table: SegmentTable, known: set[int]) -> None:
    buffers = [np.concatenate([tensor, tensor]) for tensor in TENSORS]
    found = known_fingerprints(table, buffers, NBYTES, CHECKSUMS)
    assert found.keys() == known
    taken = bind_fingerprints(table, buffers, NBYTES, memory=HostMemory()).take()
    assert {number: taken[number] for number in known} == found
    assert set(without(table, found).rows["src"]) == taken.keys() - known


def test_another_algorithm_tells_nothing() -> None:
    table = flat((0, 0, 1000), (1, 0, 1000))
    assert known_fingerprints(table, TENSORS, NBYTES, [None, CHECKSUMS[1], None]).keys() == {1}


def test_on_a_device_no_checksum_is_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 10 bytes cut words of 8, which are summed in two parts there, with zeros for what is not held."""
    table = SegmentTable.strided(dst_stride=10, src_stride=10, rows=100, row_bytes=10)
    monkeypatch.setattr(fingerprint, "device_of", lambda buffers: "a device")
    taken = bind_fingerprints(table, TENSORS, NBYTES, memory=HostMemory()).take()
    low, high = taken[0]
    assert f"{high << 64 | low:032x}" != CHECKSUMS[0]
    assert known_fingerprints(table, TENSORS, NBYTES, CHECKSUMS) == {}
