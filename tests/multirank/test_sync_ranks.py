"""Several tensor-parallel ranks follow a stream together: all of them, or none."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpusync.errors import DigestMismatchError, GpusyncError, PeerFailedError
from support.engines import EngineRank, publish_history
from support.models import ModelConfig

WAIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, size: int, port: int, root: Path, scenario: Callable[[Path, int], None], errors: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        scenario(root, rank)
    except BaseException:
        (errors / f"{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, root: Path, scenario: Callable[[Path, int], None]) -> None:
    """Run `scenario(root, rank)` on `size` processes. Fails with their tracebacks."""
    errors = root / "errors"
    errors.mkdir()
    context = mp.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=_rank, args=(rank, size, port, root, scenario, errors)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
    told = "\n".join(path.read_text() for path in sorted(errors.iterdir()))
    assert [process.exitcode for process in processes] == [0] * size, told


def follow(root: Path, rank: int) -> None:
    """One version, then three at once: in place, with no address moved."""
    engine = EngineRank(root, ModelConfig())
    addresses = engine.addresses()
    assert engine.sync.version == 0
    for version, chain in ((1, (1,)), (4, (2, 3, 4))):
        prepared = engine.sync.prepare(version)
        assert (prepared.report.commit_path, prepared.report.chain) == ("in place", chain)
        report = engine.sync.commit(prepared)
        engine.assert_live(version)
        assert report.exchanged_bytes > 0
    assert engine.addresses() == addresses
    engine.sync.close()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_follow_a_stream(tmp_path: Path, size: int) -> None:
    publish_history(tmp_path, ModelConfig(), 4)
    run_ranks(size, tmp_path, follow)


def fail_on_one(root: Path, rank: int) -> None:
    """A fault on rank 1, in prepare and in commit: every rank raises, the old version is live, the next pull works."""
    engine = EngineRank(root, ModelConfig())
    engine.sync.pull(1)
    store = engine.sync._live.store

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("the device has no memory left")

    real_prepare, real_commit = store.prepare, store.commit
    if rank == 1:
        store.prepare = broken  # type: ignore[method-assign]
    with pytest.raises(MemoryError if rank == 1 else PeerFailedError, match="no memory left"):
        engine.sync.pull(2)
    engine.assert_live(1)
    store.prepare = real_prepare  # type: ignore[method-assign]
    prepared = engine.sync.prepare(2)
    if rank == 1:
        store.commit = lambda *a, **k: (real_commit(*a, **k), broken())  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError if rank == 1 else PeerFailedError, match="no memory left"):
        engine.sync.commit(prepared)
    engine.assert_live(1)
    store.commit = real_commit  # type: ignore[method-assign]
    engine.sync.pull(2)
    engine.assert_live(2)
    engine.sync.close()


def test_a_fault_on_one_rank_is_a_failure_on_all(tmp_path: Path) -> None:
    publish_history(tmp_path, ModelConfig(), 2)
    run_ranks(2, tmp_path, fail_on_one)


def corrupt(root: Path, rank: int) -> None:
    """A version whose checksum is wrong: refused on every rank, by name."""
    engine = EngineRank(root, ModelConfig())
    with pytest.raises(GpusyncError) as caught:
        engine.sync.pull(2)
    assert isinstance(caught.value, (DigestMismatchError, PeerFailedError))
    assert "proj.weight" in str(caught.value)
    engine.assert_live(0)
    engine.sync.pull(1)
    engine.assert_live(1)
    engine.sync.close()


def test_a_wrong_checksum_is_refused_on_every_rank(tmp_path: Path) -> None:
    publish_history(tmp_path, ModelConfig(), 2)
    shard = next(
        path
        for path in (tmp_path / "stream/weight_v000002").glob("*.safetensors")
        if b'"proj.weight"' in path.read_bytes()
    )
    raw = bytearray(shard.read_bytes())
    at = raw.index(b'"proj.weight": "') + len(b'"proj.weight": "')
    raw[at] = ord("0") if raw[at] != ord("0") else ord("1")
    shard.write_bytes(raw)
    run_ranks(2, tmp_path, corrupt)


def two_hosts(root: Path, rank: int) -> None:
    engine = EngineRank(root, ModelConfig(), host=f"host{rank // 2}")
    assert engine.sync._group.leaders == (0, 2)
    for version in (1, 3):
        engine.sync.pull(version)
        engine.assert_live(version)
    if engine.sync._host is not None:
        assert engine.sync.durable_version == 3
    engine.sync.close()


def test_two_hosts_of_two_ranks_each(tmp_path: Path) -> None:
    publish_history(tmp_path, ModelConfig(), 3)
    run_ranks(4, tmp_path, two_hosts)
