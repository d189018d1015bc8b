"""One rank of `test_sharded_digests.py`: plays every scene and writes down what it saw.

Started with its rank, the number of ranks, and a directory that all of them share.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from owners import KINDS, SIZES, columns, pieces_of, random_bytes, share_out
from supplies import supplied

from gpusync.digest import (
    ALGORITHMS,
    ShardedTensor,
    Shards,
    Traffic,
    blocks,
    digest_of,
    sharded_digest,
    sharded_digests,
)
from gpusync.errors import GpusyncError
from gpusync_kernels.segments import SegmentTable

KIB = 1024
SCENES: dict[str, Callable[[int, int], Any]] = {}


def scene(play: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    SCENES[play.__name__] = play
    return play


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except (GpusyncError, RuntimeError) as error:
        fields = ("tensor", "rank", "like_rank", "first_byte", "ranks", "expected", "found")
        seen = {name: getattr(error, name, None) for name in fields}
        return {"error": type(error).__name__, "text": str(error), **seen}


def digest(algorithm: str, data: np.ndarray, shares: list[Any], rank: int, **options: Any) -> tuple[str, Traffic]:
    traffic = Traffic()
    pieces = pieces_of(data, shares[rank])
    found = sharded_digest(algorithm, data.size, pieces, dist.group.WORLD, tensor="w", traffic=traffic, **options)
    return found, traffic


@scene
def every_ownership_at_once(rank: int, size: int) -> dict[str, Any]:
    """All sizes, kinds and algorithms as one call; those up to 20,001 bytes again with a budget of many batches."""
    wanted, tensors = [], []
    for nbytes in (*SIZES, 20_001, (1 << 20) + 7):
        data = random_bytes(nbytes, nbytes)
        for kind in KINDS if nbytes < KIB * KIB else ("rows", "columns"):
            for algorithm in ALGORITHMS:
                pieces = pieces_of(data, share_out(kind, nbytes, size, seed=1)[rank])
                torch_pieces = [(offset, torch.from_numpy(buffer)) for offset, buffer in pieces]
                name = f"{algorithm}, {kind}, {nbytes} bytes"
                pieces = torch_pieces if algorithm == "blake3" else pieces
                tensors.append(ShardedTensor(name=name, algorithm=algorithm, nbytes=nbytes, pieces=pieces))
                wanted.append(digest_of(algorithm, data))
    wrong = []
    for count, budget_bytes in ((len(tensors) - 6, 100_000), (len(tensors), 64 << 20)):
        report = sharded_digests(tensors[:count], dist.group.WORLD, budget_bytes=budget_bytes)
        wrong += [t.name for t, found, want in zip(tensors, report.digests, wanted, strict=False) if found != want]
    return {"tensors": len(tensors), "wrong": wrong}


@scene
def counted(rank: int, size: int) -> dict[str, Any]:
    """What each rank sends for one tensor of 256 blocks and a half, by how it is shared out."""
    nbytes = 256 * KIB + 512
    data = random_bytes(2, nbytes)
    even = [(KIB * 256 * r // size, KIB * 256 * (r + 1) // size) for r in range(size)]
    even[-1] = (even[-1][0], nbytes)
    shares = {
        "rows of whole blocks": [[each] for each in even],
        "rows at multiples of 8": [[(a + 40 * (r > 0), b + 40 * (b < nbytes))] for r, (a, b) in enumerate(even)],
        "rows at odd bytes": [[(a + 3 * (r > 0), b + 3 * (b < nbytes))] for r, (a, b) in enumerate(even)],
        "columns of whole words": columns_of(nbytes, 64, size),
        "one owner": [[] for _ in range(size - 1)] + [[(0, nbytes)]],
    }
    seen: dict[str, Any] = {}
    for name, shared in shares.items():
        found, traffic = digest("xxh3-128", data, shared, rank)
        seen[name] = {"right": found == digest_of("xxh3-128", data), **dataclasses.asdict(traffic)}
    for algorithm in ("blake3", "adler32"):
        found, traffic = digest(algorithm, data, shares["columns of whole words"], rank)
        seen[algorithm] = {"right": found == digest_of(algorithm, data), **dataclasses.asdict(traffic)}
    short = data[:240]
    found, traffic = digest("xxh3-128", short, share_out("rows", 240, size, seed=3), rank)
    seen["short"] = {"right": found == digest_of("xxh3-128", short), **dataclasses.asdict(traffic)}
    return seen


@scene
def many_tensors_take_as_many_rounds_as_few(rank: int, size: int) -> dict[str, Any]:
    rounds, right = [], []
    for count in (2, 2000):
        data = random_bytes(3, count * KIB * 2).reshape(count, 2, KIB)
        width = KIB // size
        mine = np.ascontiguousarray(data[:, :, rank * width : (rank + 1) * width]).reshape(-1)
        every = np.arange(count)
        table = SegmentTable.strided(
            dst=0,
            dst_offset=every * 2 * width,
            dst_stride=width,
            src=every,
            src_offset=rank * width,
            src_stride=KIB,
            rows=2,
            row_bytes=width,
        )
        shards = Shards(
            names=tuple(map(str, range(count))),
            algorithms=("xxh3-128",) * count,
            nbytes=np.full(count, 2 * KIB),
            table=table,
            buffers=(mine,),
        )
        report = sharded_digests(shards, dist.group.WORLD)
        rounds.append(report.traffic.rounds)
        right.append(list(report.digests) == [digest_of("xxh3-128", each.reshape(-1)) for each in data])
    return {"rounds": rounds, "right": right}


@scene
def replicas(rank: int, size: int) -> dict[str, Any]:
    """Ranks 2k and 2k + 1 have the same part of `kv`; all have `norm`. Then one byte differs on the last rank."""
    kv, norm = random_bytes(4, 6000), random_bytes(5, 300)
    pairs = size // 2
    share = (6000 * (rank // 2) // pairs, 6000 * (rank // 2 + 1) // pairs)

    def run(kv: np.ndarray, norm: np.ndarray) -> list[str]:
        tensors = [
            ShardedTensor(name="kv", algorithm="xxh3-128", nbytes=6000, pieces=pieces_of(kv, [share])),
            ShardedTensor(name="norm", algorithm="adler32", nbytes=300, pieces=[(0, norm)]),
        ]
        return list(sharded_digests(tensors, dist.group.WORLD).digests)

    other_kv, other_norm = kv.copy(), norm.copy()
    other_kv[5990] ^= 8
    other_norm[7] ^= 8
    last = rank == size - 1
    return {
        "equal": run(kv, norm) == [digest_of("xxh3-128", kv), digest_of("adler32", norm)],
        "kv": outcome(lambda: run(other_kv if last else kv, norm)),
        "norm": outcome(lambda: run(kv, other_norm if last else norm)),
    }


@scene
def faults(rank: int, size: int) -> dict[str, Any]:
    data = random_bytes(6, 4000)
    shares = share_out("rows", 4000, size, seed=2)
    seen = {}
    gap = [list(each) for each in shares]
    gap[0] = [(1, shares[0][0][1])]
    seen["a byte on no rank"] = outcome(lambda: digest("xxh3-128", data, gap, rank)[0])
    nbytes = 4000 if rank != 1 else 3999
    seen["a piece that leaves its tensor"] = outcome(
        lambda: sharded_digest("xxh3-128", nbytes, [(0, data)], dist.group.WORLD, tensor="w")
    )
    name = "other" if rank == size - 1 else "w"
    seen["different tensors"] = outcome(
        lambda: sharded_digest("xxh3-128", 4000, [(0, data)], dist.group.WORLD, tensor=name)
    )
    real = blocks.block_sums
    if rank == 1:
        blocks.block_sums = out_of_memory
    try:
        seen["a failure on the way"] = outcome(lambda: digest("xxh3-128", data, shares, rank)[0])
    finally:
        blocks.block_sums = real
    found, _ = digest("xxh3-128", data, shares, rank)
    seen["afterwards"] = found == digest_of("xxh3-128", data)
    return seen


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


@scene
def through_windows(rank: int, size: int) -> dict[str, Any]:
    """All sizes, kinds and algorithms from a supply, each rank with a window of its own; a copy that differs; a supply
    that fails on one rank."""
    wanted, tensors = [], []
    for nbytes in (*SIZES, 20_001, 100_007):
        data = random_bytes(nbytes, nbytes)
        for kind in KINDS:
            for algorithm in ALGORITHMS:
                pieces = pieces_of(data, share_out(kind, nbytes, size, seed=1)[rank])
                name = f"{algorithm}, {kind}, {nbytes} bytes"
                tensors.append(ShardedTensor(name=name, algorithm=algorithm, nbytes=nbytes, pieces=pieces))
                wanted.append(digest_of(algorithm, data))
    window = (KIB, 5000, 1 << 20, 1500)[rank]
    shards = supplied(tensors, window)
    report = sharded_digests(shards, dist.group.WORLD, budget_bytes=100_000)
    concrete = sharded_digests(tensors, dist.group.WORLD, budget_bytes=100_000)
    wrong = [t.name for t, found, want in zip(tensors, report.digests, wanted, strict=True) if found != want]
    once = [
        t.max(initial=0) <= 1 for t, of in zip(shards.supply.times, tensors, strict=True) if "lapping" not in of.name
    ]

    kv = random_bytes(4, 9000)
    if rank == size - 1:
        kv[7777] ^= 1
    copy = [ShardedTensor(name="kv", algorithm="xxh3-128", nbytes=kv.size, pieces=[(0, kv)])]
    rows = share_out("rows", kv.size, size, seed=2)
    part = [ShardedTensor(name="kv", algorithm="xxh3-128", nbytes=kv.size, pieces=pieces_of(kv, rows[rank]))]
    failing = supplied(part, KIB, fail_at=0 if rank == 1 else None)
    return {
        "wrong": wrong,
        "same traffic": dataclasses.asdict(report.traffic) == dataclasses.asdict(concrete.traffic),
        "within": shards.supply.largest <= window,
        "once": all(once),
        "copy": outcome(lambda: sharded_digests(supplied(copy, window), dist.group.WORLD).digests),
        "failing": outcome(lambda: sharded_digests(failing, dist.group.WORLD).digests),
    }


@scene
def memory(rank: int, size: int) -> dict[str, Any]:
    """8 MiB in columns under a budget of 1 MiB; what is traced is what one call allocates."""
    width = 4096
    data = random_bytes(7, 2048 * width).reshape(-1, width)
    mine = np.ascontiguousarray(data[:, width * rank // size : width * (rank + 1) // size])
    table = SegmentTable.strided(
        dst=0,
        dst_offset=0,
        dst_stride=mine.shape[1],
        src=0,
        src_offset=width * rank // size,
        src_stride=width,
        rows=2048,
        row_bytes=mine.shape[1],
    )
    shards = Shards(
        names=("w",), algorithms=("xxh3-128",), nbytes=np.array([data.size]), table=table, buffers=(mine.reshape(-1),)
    )
    tracemalloc.start()
    report = sharded_digests(shards, dist.group.WORLD, budget_bytes=1 << 20)
    # not stopped: gloo's thread may be in a traced allocation, which Python 3.11 does not survive
    peak = tracemalloc.get_traced_memory()[1]
    return {
        "peak": peak,
        "right": report.digests[0] == digest_of("xxh3-128", data.reshape(-1)),
        "sums": report.traffic.sums,
    }


def a_rank_is_gone(rank: int, size: int, place: Path) -> dict[str, Any]:
    """Not among the scenes: there is no group after it. Nobody may be in the barrier still when a rank leaves."""
    (place / f"through.{rank}").touch()
    if rank == size - 1:
        while len(list(place.glob("through.*"))) < size:
            time.sleep(0.01)
        os._exit(0)
    data = random_bytes(8, 4000)
    return outcome(lambda: digest("xxh3-128", data, share_out("rows", 4000, size, seed=2), rank)[0])


def columns_of(nbytes: int, width: int, size: int) -> list[Any]:
    """Columns of equal width."""

    class Even:
        def integers(self, low: int, high: int, count: int) -> np.ndarray:
            return np.arange(1, count + 1) * width // size

    return columns(nbytes, width, size, Even())  # type: ignore[arg-type]


def main() -> None:
    rank, size, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    gone = functools.partial(a_rank_is_gone, place=place)
    for name, play in [*SCENES.items(), ("a_rank_is_gone", gone)]:
        dist.barrier()
        start = time.perf_counter()
        seen = play(rank, size)
        seen["seconds"] = time.perf_counter() - start
        (place / f"{name}.{rank}.json").write_text(json.dumps(seen))
    # No orderly end of a group that has lost a member.
    os._exit(0)


if __name__ == "__main__":
    main()
