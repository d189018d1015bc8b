"""Memory where the params are: numpy in host memory, torch on a device. What is given out is counted."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpusync.store.frames import HostRangeDecoder, RangeDecoder
from gpusync_kernels.buffers import byte_view

Buffer = Any


class Memory(Protocol):
    """Where a rank's bytes live. `live_bytes` is held now by what this object gave out, `peak_bytes` the most that was
    held at once since `reset_peak`. Errors of a full memory are those that `is_out_of_memory` knows."""

    frames: RangeDecoder

    @property
    def live_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...

    def empty(self, nbytes: int) -> Buffer:
        """`nbytes` bytes of unknown content, aligned to 16."""
        ...

    def zeros(self, nbytes: int) -> Buffer: ...

    def zeros_like(self, buffer: Buffer) -> Buffer: ...

    def upload(self, array: npt.NDArray[Any]) -> Buffer:
        """A host array (any integer dtype) where the params are. In host memory that is the array itself: it must not
        be written to afterwards."""
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
        self.frames: RangeDecoder = HostRangeDecoder()
        self.live_bytes = self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._counted(np.empty(nbytes, np.uint8))

    def zeros(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._counted(np.zeros(nbytes, np.uint8))

    def zeros_like(self, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._counted(np.zeros_like(buffer, subok=False))

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # What owns its bytes was read or cut out for us; a view is of a file that is mapped, which is not memory of ours.
        return self._counted(array) if array.flags.owndata else array

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        return byte_view(buffer)

    def synchronise(self) -> None:
        return

    def _counted(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.live_bytes += array.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(array, self._forget, array.nbytes)
        return array

    def _forget(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a memory is full, on the host or on a device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)
