"""Live weights on a CUDA device: two ranks that share it follow a stream, bit for bit what a fresh load would hold.

Needs one device and triton, nothing else: the stream and the model are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import gpusync
from gpusync.errors import PeerFailedError
from support.checkpoints import write_checkpoint
from support.engines import EngineRank, as_state, history, publish_history
from support.models import ModelConfig
from support.ranks import run_ranks

VERSIONS = 3
CHAINS = {1: (1,), 3: (2, 3)}  # one delta, then two at once


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("triton", reason="triton is not installed")


def follow(root: Path, rank: int, *, device: str = "cuda") -> None:
    """In place, on the device, with no address moved; verified before and after."""
    engine = EngineRank(root, ModelConfig(), device=device)
    addresses = engine.addresses()
    assert {tensor.device.type for tensor in engine.model.parameters()} == {device}
    if device == "cuda":
        assert type(engine.sync._rank.live.store.memory).__name__ == "DeviceMemory"
    for version, chain in CHAINS.items():
        prepared = engine.sync.prepare(version)
        assert (prepared.report.commit_path, prepared.report.chain) == ("in place", chain)
        engine.assert_live(version - len(chain))
        engine.sync.commit(prepared)
        engine.assert_live(version)
    assert engine.addresses() == addresses
    engine.sync.close()


def fail_on_one(root: Path, rank: int, *, device: str = "cuda") -> None:
    """Rank 1 has written its params when it fails: both ranks hold the old version again, and the next pull works."""
    engine = EngineRank(root, ModelConfig(), device=device)
    engine.sync.pull(1)
    prepared = engine.sync.prepare(2)
    commit = engine.sync._rank.live.store.commit

    def write_and_fail(update: object) -> None:
        commit(update)  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("the device has no memory left")

    if rank == 1:
        engine.sync._rank.live.store.commit = write_and_fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else PeerFailedError, match="no memory left"):
        engine.sync.commit(prepared)
    engine.assert_live(1)
    engine.sync._rank.live.store.commit = commit  # type: ignore[method-assign]
    engine.sync.pull(3)
    engine.assert_live(3)
    engine.sync.close()


def publish_slime(root: Path) -> None:
    publish_history(root, ModelConfig(), VERSIONS)


def publish_ours(root: Path) -> None:
    """The same states, in the forms that gpusync's own publisher chooses."""
    base, *states = history(ModelConfig(), VERSIONS)
    write_checkpoint(root / "base", as_state(base))
    publisher = gpusync.Publisher(root / "stream", base_dir=root / "base", encoding="gpusync")
    for state in states:
        publisher.publish(state.items())


@pytest.mark.gpu
@pytest.mark.parametrize("publish", [publish_slime, publish_ours])
def test_two_ranks_on_one_device_follow_a_stream(tmp_path: Path, publish: Callable[[Path], None]) -> None:
    publish(tmp_path)
    run_ranks(2, tmp_path, partial(follow, device="cuda"))


@pytest.mark.gpu
def test_a_fault_in_a_commit_leaves_the_old_version_on_both(tmp_path: Path) -> None:
    publish_slime(tmp_path)
    run_ranks(2, tmp_path, partial(fail_on_one, device="cuda"))
