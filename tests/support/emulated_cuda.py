"""CUDA and nvCOMP played by CPU tensors and libzstd, so that what stands around their calls runs anywhere: what is sent
where, in which batches, how much is held. It shows nothing about a GPU, nor about the order of streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

SCRATCH_PER_BYTE = 3.1


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.ptr, self.cuda_stream, self.priority = 0, 7, 7, priority

    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    def record(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


class Nvcomp:
    """The module. `batches` are the decoded bytes of every call of decode."""

    __version__ = "emulated"

    class BitstreamKind:
        RAW = "raw"

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.refuse = False
        self._allocate: Any = None
        module = self

        class Codec:
            def __init__(self, **options: Any) -> None:
                """algorithm: device_id: cuda_stream: bitstream_kind:"""
                assert options["algorithm"] == "Zstd"
                assert options["bitstream_kind"] == "raw"

            def decode(self, srcs: list[np.ndarray], out: list[np.ndarray]) -> None:
                """srcs: out:"""
                module._decode(srcs, out)

        self.Codec = Codec

    def set_device_allocator(self, allocator: Any = None) -> None:
        """allocator:"""
        self._allocate = allocator

    def as_arrays(self, buffer: torch.Tensor, offsets: list[int], sizes: list[int], cuda_stream: int = 0) -> Any:
        """buffer: offsets: sizes: cuda_stream:"""
        assert cuda_stream == Stream().cuda_stream
        assert all(offset % 16 == 0 for offset in offsets)
        return [buffer.numpy()[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def _decode(self, srcs: list[np.ndarray], out: list[np.ndarray]) -> None:
        decoded = sum(map(len, out))
        try:
            _scratch = self._allocate(int(SCRATCH_PER_BYTE * decoded), Stream())
        except RuntimeError:
            raise RuntimeError("an error of another class, from below") from None
        if self.refuse:
            raise RuntimeError("an illegal memory access was encountered")
        self.batches.append(decoded)
        for stored, room in zip(srcs, out, strict=True):
            room[:] = np.frombuffer(zstandard.ZstdDecompressor().decompress(stored.tobytes()), np.uint8)


def install(monkeypatch: pytest.MonkeyPatch) -> Nvcomp:
    """Until the test ends the CPU is the one CUDA device, and nvCOMP is there."""
    from gpusync.codec.device import frames, nvcomp, staging
    from gpusync.store import device_memory

    emulated = Nvcomp()
    replaced = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "is_available": lambda: True,
        "caching_allocator_alloc": lambda nbytes, device, stream: 4096,
        "caching_allocator_delete": lambda pointer: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(staging, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    for module in (frames, nvcomp, staging, device_memory):
        monkeypatch.setattr(module, "with_index", torch.device)
    monkeypatch.setattr(nvcomp, "_module", lambda: emulated)
    scratch = nvcomp.Scratch()
    for module in (frames, nvcomp):
        monkeypatch.setattr(module, "scratch", scratch)
    return emulated
