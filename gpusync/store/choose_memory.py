"""Chooses where a rank's scratch lies: where its params do."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import torch

from gpusync.errors import BackendUnavailableError, LayoutError
from gpusync.store.memory import HostMemory, Memory

Want = Literal["auto", "gpu", "cpu"]


def choose_memory(params: Mapping[str, torch.Tensor], want: Want = "auto") -> tuple[Memory, str]:
    """The memory for a rank with these params, those that are patched, and why. No params: the host's.

    Raises LayoutError, naming two, where params lie on different devices; BackendUnavailableError where another place
    than theirs is demanded, or where nothing here can work on theirs.
    """
    if want not in ("auto", "gpu", "cpu"):
        raise BackendUnavailableError("unknown place for scratch memory", expected="auto, gpu or cpu", found=want)
    device = _device_of(params)
    if device.type == "cpu":
        if want == "gpu":
            raise BackendUnavailableError(
                "weights cannot be updated on a GPU", expected="params on a CUDA device", found="params on the CPU"
            )
        return HostMemory(), "params are on the CPU"
    if device.type != "cuda" or want == "cpu":
        raise BackendUnavailableError(
            "weights cannot be updated where they are",
            expected="params on the CPU" if want == "cpu" else "params on the CPU or on a CUDA device",
            found=f"params on {device}",
        )
    if find_spec("triton") is None:
        raise BackendUnavailableError(
            f"weights on {device} cannot be updated", expected="triton", found="not installed"
        )
    from gpusync.store.device_memory import DeviceMemory

    return DeviceMemory(device), f"params are on {device}"


def _device_of(params: Mapping[str, torch.Tensor]) -> torch.device:
    found: dict[torch.device, str] = {}
    for name, tensor in params.items():
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        (one, name), (other, other_name) = list(found.items())[:2]
        raise LayoutError(
            f"parameters `{name}` and `{other_name}` lie on different devices",
            expected=f"`{other_name}` on {one}",
            found=other,
        )
    return next(iter(found), torch.device("cpu"))
