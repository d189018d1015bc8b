"""A rank whose params are on a device: what the references give on the host its kernels give, and nothing else moves.

On a GPU; without one under Triton's interpreter, which `test_rank_interpreter.py` starts in a process of its own. CPU
tensors are a device then, whose memory is emulated.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from store import test_rank

from gpusync.store.device_memory import DeviceMemory
from support import emulated_cuda
from support.models import ModelConfig, fresh_load, make_state
from support.models_apply import assert_same

pytestmark = [
    pytest.mark.gpu,
    # a loop bound that is made of an array of one element
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if INTERPRETED:
        from gpusync_kernels import buffers

        as_device = lambda buffer: None if isinstance(buffer, np.ndarray) else torch.device("cpu")  # noqa: E731
        monkeypatch.setattr(buffers, "_device", as_device)
        emulated_cuda.install(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    place = "cpu" if INTERPRETED else "cuda"
    monkeypatch.setattr(test_rank, "HostMemory", lambda: DeviceMemory(place))
    return place


# All tensors at once, and the larger ones in windows.
@pytest.mark.parametrize("staging_bytes", [1 << 30, 20_000])
def test_a_chain_is_committed_and_rolled_back_on_the_device(tmp_path: Path, device: str, staging_bytes: int) -> None:
    config = ModelConfig()
    state = make_state(config)
    chain, at = [], state
    for number, form in enumerate(["xor", "overwrite", "gf01 planes", "gf01 steps", "gs01", "gp01"]):
        at = test_rank.changed(at, number)
        chain.append((form, at))
    with torch.device(device):
        rank = test_rank.Rank(config, state, staging_bytes=staging_bytes)
    before = rank.live()
    prepared = rank.store.prepare(*rank.update(tmp_path / "compact", chain))
    assert rank.live() == before
    rank.store.commit(prepared)
    assert rank.store.verify(prepared) is None
    rank.model.post_load()
    assert_same(rank.model, fresh_load(config, test_rank.ALONE, at))
    rank.store.roll_back(prepared)
    assert rank.live() == before
