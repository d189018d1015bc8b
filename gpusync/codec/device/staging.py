"""The way of host bytes to a device: through two pinned buffers that take turns, on a stream of its own.

A copy from pageable memory would hold the launching thread until it is done, and pinning whatever comes would let
pinned memory grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpusync.codec.device.batches import Piece, cut_chunks

PINNED_BYTES = 64 << 20
_LOWEST_PRIORITY = 0  # of torch and CUDA; an engine's own stream has it too, unless it asked for more


class PinnedRing:
    """Sends bytes to one device. For one thread at a time. `nbytes` of pinned memory, both buffers together."""

    def __init__(self, device: Any, *, nbytes: int = PINNED_BYTES) -> None:
        self.device = with_index(device)
        self.nbytes = nbytes
        self.stream = side_stream(self.device)
        self._chunk_bytes = max(nbytes // 2, 1)
        self._buffers = [pinned(self._chunk_bytes) for _ in range(2)]
        self._sent = [event() for _ in self._buffers]
        self._turn = 0

    def send(self, pieces: Sequence[Piece], target: Any) -> None:
        """Bytes of the u8 tensor `target` become the pieces, which ascend by their place; short gaps between them
        become undefined. When it returns the pieces may go, but the last copies are still under way on `stream`. The
        caller has made `stream` wait for what used `target` before, and makes whoever reads it wait for `stream`.
        """
        import torch

        for start, nbytes, parts in cut_chunks(pieces, self._chunk_bytes):
            buffer, sent = self._buffers[self._turn], self._sent[self._turn]
            self._turn = 1 - self._turn
            sent.synchronize()
            room = buffer.numpy()
            for at, data in parts:
                room[at : at + len(data)] = np.frombuffer(data, np.uint8)
            with torch.cuda.stream(self.stream):
                target[start : start + nbytes].copy_(buffer[:nbytes], non_blocking=True)
                sent.record(self.stream)


def with_index(device: Any) -> Any:
    """The `torch.device` by its number: "cuda" means the current one."""
    import torch

    device = torch.device(device)
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


def side_stream(device: Any) -> Any:
    """A stream of the lowest priority, for work beside serving."""
    import torch

    return torch.cuda.Stream(device, priority=_LOWEST_PRIORITY)  # type: ignore[no-untyped-call]


def event() -> Any:
    import torch

    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def pinned(nbytes: int) -> Any:
    """A u8 tensor on the host that a device can read without a copy in between."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
