"""Memory where the params are: numpy on the host's side of a CPU rank, torch on a device. Allocations are counted."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import byte_view

Buffer = Any


class Memory(Protocol):
    """Where a rank's bytes live. `peak_bytes` is the most that was held at once by what this object gave out."""

    @property
    def peak_bytes(self) -> int: ...

    def empty(self, nbytes: int) -> Buffer:
        """`nbytes` bytes of unknown content, aligned to 16."""
        ...

    def zeros(self, nbytes: int) -> Buffer: ...

    def zeros_like(self, buffer: Buffer) -> Buffer: ...

    def upload(self, array: npt.NDArray[Any]) -> Buffer:
        """A copy of a host array (any integer dtype)."""
        ...

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """The bytes of a buffer, on the host; shares memory where that can be."""
        ...

    def synchronise(self) -> None:
        """Wait until everything that was launched has happened."""
        ...


class HostMemory:
    """Numpy arrays. For ranks on a CPU, whose params are torch CPU tensors."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self.peak_bytes += nbytes
        return np.empty(nbytes, np.uint8)

    def zeros(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self.peak_bytes += nbytes
        return np.zeros(nbytes, np.uint8)

    def zeros_like(self, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.peak_bytes += buffer.nbytes
        return np.zeros_like(buffer)

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.peak_bytes += array.nbytes
        return array.copy()

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        return byte_view(buffer)

    def synchronise(self) -> None:
        return
