"""Tables to the device, and the one way a kernel is launched.

Kernels take pointers to tables and compile-time constants only; addresses and sizes are in the tables. So every kernel
compiles once per constant, not once per argument value, and all that can ever be launched is known beforehand
(`configurations.py`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpusync_kernels.tiling import Launch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def upload_launch(launch: Launch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return upload(launch.table, device), upload(launch.piece_of_program, device)


def zeros(shape: tuple[int, ...], device: torch.device, dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
    return torch.from_numpy(np.zeros(0, dtype)).new_zeros(shape, device=device)


def launch(kernel: Any, programs: int, *tensors: torch.Tensor, num_warps: int = 4, **constants: int) -> None:
    """Runs `kernel` on the current stream of the tensors' device. Nothing happens for 0 programs."""
    if programs == 0:
        return
    device = tensors[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            for tensor in tensors:  # a table may have been made on another stream; it must outlive this one's use of it
                tensor.record_stream(stream)
        kernel[(programs,)](*tensors, num_warps=num_warps, **constants)
