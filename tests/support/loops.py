"""The inner loops of the host, by name."""

from __future__ import annotations

from typing import Literal

import pytest

from gpusync_kernels import HostOps, choose_host_ops


def loops_of(name: Literal["numpy", "numba"]) -> HostOps:
    if name == "numba":
        pytest.importorskip("numba", reason="numba, the extra `fast`, is not installed")
    return choose_host_ops(name)[0]
