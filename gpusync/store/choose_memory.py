"""Which memory the params of a rank are in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from gpusync.store.memory import HostMemory, Memory

Want = Literal["auto", "gpu", "cpu"]


def choose_memory(params: Mapping[str, torch.Tensor], *, want: Want = "auto") -> tuple[Memory, str]:
    return HostMemory(), "all params are in host memory"
