"""Pieces in device memory: the same digests and the same errors, on a GPU; under Triton's interpreter without one.

`test_device_interpreter.py` starts the interpreter in a process of its own. Kernels then run on CPU tensors, so what
tells a device from the host is told that CPU tensors are one. Sizes are small: the interpreter does some MB/s.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from owners import pieces_of, random_bytes, share_out
from supplies import supplied

from gpusync.digest import (
    Partial,
    ReplicaMismatchError,
    ShardedTensor,
    combine,
    digest_of,
    partial,
    sharded_digests,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def place(monkeypatch):
    """Pieces of a tensor, on the device."""
    if INTERPRETED:
        from gpusync_kernels import buffers

        as_device = lambda buffer: None if isinstance(buffer, np.ndarray) else torch.device("cpu")  # noqa: E731
        monkeypatch.setattr(buffers, "_device", as_device)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = "cpu" if INTERPRETED else "cuda"

    def place(data, ranges):
        return [(offset, torch.from_numpy(buffer).to(device)) for offset, buffer in pieces_of(data, ranges)]

    return place


@pytest.mark.parametrize(
    ("algorithm", "kind", "size", "budget"),
    [
        # odd columns: sums from several ranks, cut words, a shared last stripe
        ("xxh3-128", "columns", 7001, 1 << 20),
        # accumulators from rank to rank, every block a batch
        ("xxh3-128", "rows", 2500, 300),
        ("xxh3-128", "overlapping", 3000, 1 << 20),
        ("xxh3-128", "one owner", 5000, 300),
        ("xxh3-128", "random", 240, 1 << 20),
        ("adler32", "columns", 7001, 1 << 20),
        ("adler32", "one owner", 700, 1 << 20),
        ("blake3", "random", 3000, 1 << 20),
        ("blake3", "one owner", 700, 1 << 20),
    ],
)
def test_device_pieces_equal_the_library(place, algorithm, kind, size, budget):
    data = random_bytes(1, size)
    shares = share_out(kind, size, 3, seed=5)
    made = [partial(algorithm, size, place(data, ranges)) for ranges in shares]
    assert combine(algorithm, size, made, budget_bytes=budget) == digest_of(algorithm, data)


@pytest.mark.parametrize(
    ("algorithm", "kind", "size"),
    [
        ("xxh3-128", "columns", 5001),
        ("xxh3-128", "overlapping", 3000),
        ("xxh3-128", "one owner", 5000),
        ("adler32", "one owner", 3000),
        ("blake3", "random", 3000),
    ],
)
def test_device_windows_equal_the_library(place, algorithm, kind, size):
    """Through a scratch on the device that has two blocks; every byte goes once, but for what is compared."""
    data = random_bytes(1, size)
    made = []
    for ranges in share_out(kind, size, 2, seed=5):
        pieces = place(data, ranges)
        device = pieces[0][1].device if pieces else None
        shards = partial(algorithm, size, pieces).shards
        made.append(Partial(supplied(shards, 2048, device=device)))
    assert combine(algorithm, size, made) == digest_of(algorithm, data)
    for part in made:
        assert part.shards.supply.largest <= 2048
        assert kind == "overlapping" or part.shards.supply.times[0].max() <= 1


def test_ranks_on_the_host_and_on_a_device_work_together(place):
    data = random_bytes(2, 3001)
    shares = share_out("random", data.size, 2, seed=6)
    made = [partial("xxh3-128", data.size, pieces_of(data, shares[0]))]
    made += [partial("xxh3-128", data.size, place(data, ranges)) for ranges in shares]
    assert combine("xxh3-128", data.size, made) == digest_of("xxh3-128", data)


def test_a_differing_copy_on_a_device_is_named(place):
    data = random_bytes(3, 1500)
    other = data.copy()
    other[1200] ^= 1
    copies = (pieces_of(data, [(0, 1500)]), place(data, [(0, 1500)]), place(other, [(0, 1500)]))
    made = [partial("xxh3-128", 1500, pieces, tensor="w") for pieces in copies]
    with pytest.raises(ReplicaMismatchError) as caught:
        combine("xxh3-128", 1500, made)
    assert (caught.value.rank, caught.value.like_rank, caught.value.first_byte) == (2, 0, 1200)


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter minutes")
def test_many_large_tensors(place):
    """Whole and in columns, 300 MB together, within a budget of 16 MiB."""
    sizes = [(64 << 20) + 3, 1 << 20, 240, *([100_003] * 300)]
    tensors, wanted = [], []
    for number, size in enumerate(sizes):
        data = random_bytes(number, size)
        half = size // 2 + 1
        pieces = place(data, [(0, half), (half, size)])
        tensors.append(ShardedTensor(name=str(number), algorithm="xxh3-128", nbytes=size, pieces=pieces))
        wanted.append(digest_of("xxh3-128", data))
    assert list(sharded_digests(tensors, None, budget_bytes=16 << 20).digests) == wanted
