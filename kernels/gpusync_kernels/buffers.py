"""Byte buffers: numpy arrays and torch tensors, seen as bytes, addresses and a device.

A buffer is contiguous; of a live param whose strides are not, hand in its storage. Torch is never imported here:
whoever holds a tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = Any
"""`numpy.ndarray` or `torch.Tensor`, contiguous, of any dtype."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]


def device_of(buffers: Iterable[Buffer]) -> Any:
    """The `torch.device` that all buffers share, or None when they lie in host memory.

    Raises ValueError when they do not lie together: a kernel cannot reach both.
    """
    found = {_device(buffer) for buffer in buffers}
    if len(found) > 1:
        raise ValueError(f"buffers of one call lie in different memories: {sorted(map(str, found))}")
    return found.pop() if found else None


def nbytes_of(buffer: Buffer) -> int:
    return int(buffer.nbytes)


def byte_view(buffer: Buffer) -> Bytes:
    """The bytes of a host buffer, without a copy. Writing to the view writes to the buffer."""
    _require_contiguous(buffer)
    if not isinstance(buffer, np.ndarray):
        buffer = buffer.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    view: Bytes = buffer.reshape(-1).view(np.uint8)
    return view


def address_of(buffer: Buffer) -> int:
    """Where the first byte lies, on the host or on the device."""
    _require_contiguous(buffer)
    return int(buffer.ctypes.data) if isinstance(buffer, np.ndarray) else int(buffer.data_ptr())


def addresses_of(buffers: Sequence[Buffer]) -> Ints:
    return np.array([address_of(buffer) for buffer in buffers], np.int64)


def sizes_of(buffers: Sequence[Buffer]) -> Ints:
    return np.array([nbytes_of(buffer) for buffer in buffers], np.int64)


def _device(buffer: Buffer) -> Any:
    return None if isinstance(buffer, np.ndarray) or buffer.device.type == "cpu" else buffer.device


def _require_contiguous(buffer: Buffer) -> None:
    contiguous = buffer.flags.c_contiguous if isinstance(buffer, np.ndarray) else buffer.is_contiguous()
    if not contiguous:
        raise ValueError(f"buffer of shape {tuple(buffer.shape)} is not contiguous; hand in its storage")
