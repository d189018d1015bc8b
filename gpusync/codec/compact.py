"""Compact form: what changed between two states of some bytes, as ascending element positions and the new elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusync_kernels.host import host_ops

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.uint32]

ELEMENT_TYPES: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def changed_positions(old: Bytes | None, new: Bytes, *, element_bytes: int) -> Positions:
    """Ascending positions (u32, in elements) at which two equally long u8 windows differ; without `old`, at which `new`
    is not zero.

    The windows hold whole elements of 1, 2, 4 or 8 bytes, fewer than 2**31 of them.
    """
    found: Positions = host_ops().changed_positions(old, new, element_bytes=element_bytes)
    return found


def elements(window: Bytes, *, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """The window's bytes as unsigned little-endian elements; shares memory."""
    view: npt.NDArray[np.unsignedinteger] = window.view(ELEMENT_TYPES[element_bytes])
    return view
