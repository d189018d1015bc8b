"""Memory where the params are: numpy for a rank on a CPU; `device_memory` for one on a GPU. All of it is counted."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpusync.codec.frame_decoder import FrameDecoder, HostFrameDecoder
from gpusync_kernels.buffers import byte_view, nbytes_of
from gpusync_kernels.host import host_ops

Buffer = Any
MAX_WORKERS = 8


class Memory(Protocol):
    """Where a rank's bytes live. What it gives out counts for as long as the buffer, or any view of it, is there."""

    @property
    def live_bytes(self) -> int:
        """Held now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Held at once, at most, since `reset_peak`."""
        ...

    @property
    def decoder(self) -> FrameDecoder:
        """Decodes frames into this memory."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """How much scratch is of use at once: on a device as much as may be had, on the host what caches hold."""
        ...

    @property
    def pause_workers(self) -> int:
        """Threads that are of use inside the pause, where nothing else runs: 1 on a device."""
        ...

    @property
    def backend(self) -> tuple[str, str]:
        """`(applier, decoder)` with the reasons, for reports."""
        ...

    def warm_up(self) -> None:
        """Compile everything that a pause must not wait for."""
        ...

    def reset_peak(self) -> None: ...

    def empty(self, nbytes: int) -> Buffer:
        """`nbytes` bytes of unknown content, aligned to 16."""
        ...

    def zeros(self, nbytes: int) -> Buffer: ...

    def zeros_like(self, buffer: Buffer) -> Buffer: ...

    def upload(self, array: npt.NDArray[Any]) -> Buffer:
        """A host array (any integer dtype) where the params are. In host memory that is the array itself, which must
        not change any more."""
        ...

    def upload_all(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Buffer]:
        """`upload` of each. On a device, views of one allocation, sent together: it lives while any of them does."""
        ...

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """The bytes of a buffer, on the host; shares memory where that can be."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """For work beside serving: what is launched inside neither waits for the model's work nor holds it up, beyond
        sharing the device. It sees what was launched before; at the end all of it has happened.
        """
        ...

    def synchronise(self) -> None:
        """Wait until everything that was launched, by anybody, has happened."""
        ...


class Accounts:
    """Bytes held now and at most, by owners that are gone when nothing refers to them any more."""

    def __init__(self) -> None:
        self._live = self._peak = 0
        self._lock = threading.Lock()
        # A finaliser may run in the middle of anything, also while the lock is held: it only leaves a note.
        self._released: deque[int] = deque()

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._live

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._settle()
            self._peak = self._live

    def hold(self, owner: object, nbytes: int) -> None:
        """`owner` is what views keep alive: an array that owns its memory, or a tensor's storage."""
        weakref.finalize(owner, self._released.append, nbytes).atexit = False
        with self._lock:
            self._settle()
            self._live += nbytes
            self._peak = max(self._peak, self._live)

    def _settle(self) -> None:
        while self._released:
            self._live -= self._released.popleft()


class HostMemory:
    """Numpy arrays. For ranks on a CPU, whose params are torch CPU tensors."""

    scratch_bytes = 32 << 20

    @property
    def pause_workers(self) -> int:
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))

    def __init__(self) -> None:
        self._accounts = Accounts()
        self.decoder: FrameDecoder = HostFrameDecoder()

    @property
    def backend(self) -> tuple[str, str]:
        where = "params are in host memory"
        return f"{host_ops().name}: {where}", f"libzstd on the host: {where}"

    def warm_up(self) -> None:
        host_ops()

    def reset_peak(self) -> None:
        self._accounts.reset_peak()

    @property
    def live_bytes(self) -> int:
        return self._accounts.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._accounts.peak_bytes

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._held(np.empty(nbytes, np.uint8))

    def zeros(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._held(np.zeros(nbytes, np.uint8))

    def zeros_like(self, buffer: Buffer) -> npt.NDArray[Any]:
        if isinstance(buffer, np.ndarray):
            return self._held(np.zeros(buffer.shape, buffer.dtype))
        return self.zeros(nbytes_of(buffer))

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        array = np.ascontiguousarray(array)
        # What owns its bytes was read or cut out for us; a view is of a mapped file, which is no memory of ours.
        return self._held(array) if array.flags.owndata else array

    def upload_all(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        return [self.upload(array) for array in arrays]

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        return byte_view(buffer)

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronise(self) -> None:
        return

    def _held(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._accounts.hold(array, array.nbytes)
        return array


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the host or on a device.

    That is MemoryError and torch.OutOfMemoryError; torch's CPU allocator, pinned memory and Triton raise RuntimeErrors
    that only their texts tell apart.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in told or "can't allocate memory" in told)
