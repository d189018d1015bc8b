"""Memory on a CUDA device: torch tensors, filled through bounded pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpusync.codec.device.batches import aligned
from gpusync.codec.device.staging import PINNED_BYTES, PinnedRing, side_stream, with_index
from gpusync.codec.frame_decoder import choose_frame_decoder
from gpusync.store.memory import Accounts

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Kernels read bits; torch has signed integers of every width."""


class DeviceMemory:
    """For one rank's thread; others may use it if they take turns. Counts what it gave out, not what torch caches.

    Uploads take two pinned buffers, `pinned_bytes` together, whatever is sent. The current stream waits for them, the
    thread does not, unless there are more bytes than that.
    """

    scratch_bytes = 1 << 62
    pause_workers = 1

    def __init__(self, device: torch.device | str, *, pinned_bytes: int = PINNED_BYTES) -> None:
        self.device: torch.device = with_index(device)
        self.pinned_bytes = pinned_bytes
        self._accounts = Accounts()
        self.decoder, why = choose_frame_decoder(self.device)
        self.backend = (f"triton on {self.device}", why)
        self._ring: PinnedRing | None = None
        self._beside: Any = None

    def warm_up(self) -> None:
        from gpusync_kernels.device.configurations import compile_all

        compile_all(self.device)

    def reset_peak(self) -> None:
        self._accounts.reset_peak()

    @property
    def live_bytes(self) -> int:
        return self._accounts.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._accounts.peak_bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._held(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def zeros(self, nbytes: int) -> torch.Tensor:
        return self._held(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))

    def zeros_like(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._held(torch.zeros(buffer.shape, dtype=buffer.dtype, device=self.device))

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return self.upload_all([array])[0]

    def upload_all(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        hosts = [np.ascontiguousarray(array) for array in arrays]
        places, room = [], 0
        for host in hosts:
            places.append(room)
            room += aligned(host.nbytes)
        target = self.empty(room)
        pieces = [(at, _bytes_of(host)) for at, host in zip(places, hosts, strict=True) if host.nbytes]
        if pieces:
            self._send(pieces, target)
        return [
            target[at : at + host.nbytes].view(WORDS[host.itemsize]).reshape(host.shape)
            for at, host in zip(places, hosts, strict=True)
        ]

    def download(self, buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
        data: npt.NDArray[np.uint8] = buffer.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        return data

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Buffers that are made inside may be used on another stream once this has ended, and must not be dropped while
        that is at work on them: synchronise first.
        """
        if self._beside is None:
            self._beside = side_stream(self.device)
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._beside):
                yield
        finally:
            self._beside.synchronize()

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def _send(self, pieces: list[tuple[int, memoryview]], target: torch.Tensor) -> None:
        if self._ring is None:
            self._ring = PinnedRing(self.device, nbytes=self.pinned_bytes)
        current = torch.cuda.current_stream(self.device)
        # The allocator may have given memory that earlier work of this stream is still using.
        self._ring.stream.wait_stream(current)
        self._ring.send(pieces, target)
        current.wait_stream(self._ring.stream)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._accounts.hold(storage, storage.nbytes())
        return tensor


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))
