"""Where the device tests run: on a CUDA device, or on the CPU under Triton's interpreter in a process of its own.

`test_interpreter.py` starts that process with TRITON_INTERPRET=1; kernels then run on CPU tensors, so what decides
between reference and kernel is told that CPU tensors are a device.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    """The interpreter of Triton 3.6 makes a loop bound of a one-element array, which numpy 2.3 warns about."""
    warning = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def device(monkeypatch):
    if INTERPRETED:
        from gpusync_kernels import buffers

        as_device = lambda buffer: None if isinstance(buffer, np.ndarray) else torch.device("cpu")  # noqa: E731
        monkeypatch.setattr(buffers, "_device", as_device)
        assert buffers.device_of([torch.zeros(1)]) is not None, "the reference would run, not the kernel"
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def place(device):
    """Copies an array to the device, to an address of this phase modulo 16, between poisoned bytes that must stay."""
    guards = []

    def place(array: np.ndarray, phase: int = 0):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        room = torch.full((data.size + 64,), 0xA5, dtype=torch.uint8, device=device)
        start = (phase - room.data_ptr()) % 16
        room[start : start + data.size] = torch.from_numpy(data.copy()).to(device)
        guards.append((room, start, start + data.size))
        return room[start : start + data.size]

    yield place
    for room, start, stop in guards:
        assert bool((room[:start] == 0xA5).all()), "bytes before a buffer were written"
        assert bool((room[stop:] == 0xA5).all()), "bytes after a buffer were written"
