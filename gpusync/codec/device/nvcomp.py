"""The calls of nvCOMP that are made, and its scratch memory, which comes from torch's caching allocator.

Every name and parameter used here stands in `REQUIRED`, so that another release that lacks one is told before a byte is
decoded. nvCOMP imports without a GPU; every call of it raises RuntimeError then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gpusync.codec.device.staging import side_stream, with_index
from gpusync.errors import BackendUnavailableError

SCRATCH_PER_BYTE = 3.1
"""Of device memory that nvCOMP's zstd takes for a decoded byte."""

# what is called, and the parameters that its docstring must name
REQUIRED: Mapping[str, Sequence[str]] = {
    "as_arrays": ("buffer", "offsets", "sizes", "cuda_stream"),
    "Codec.__init__": ("algorithm", "device_id", "cuda_stream", "bitstream_kind"),
    "Codec.decode": ("srcs", "out"),
    "BitstreamKind.RAW": (),
    "set_device_allocator": ("allocator",),
}


def why_unavailable(device: Any) -> str | None:
    """What keeps nvCOMP from decoding on this CUDA device; None if nothing does."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        nvcomp = _module()
    except ImportError as error:
        return f"nvidia.nvcomp cannot be imported ({error})"
    missing = missing_calls(nvcomp)
    if missing:
        return f"nvidia.nvcomp {nvcomp.__version__} lacks {', '.join(missing)}"
    try:
        ZstdCodec(device, side_stream(device))
    except RuntimeError as error:
        return f"nvCOMP does not work on {device} ({error})"
    return None


def missing_calls(nvcomp: Any) -> list[str]:
    """What of `REQUIRED` this module does not have. Signatures of extension modules stand in their docstrings."""
    missing = []
    for call, parameters in REQUIRED.items():
        found = nvcomp
        for name in call.split("."):
            found = getattr(found, name, None)
        text = getattr(found, "__doc__", None) or ""
        missing += [call] if found is None else [f"{call}({name})" for name in parameters if f"{name}:" not in text]
    return missing


def version() -> str:
    return str(_module().__version__)


class ZstdCodec:
    """One thread's codec: raw zstd frames, decoded on one stream of one device."""

    def __init__(self, device: Any, stream: Any) -> None:
        nvcomp = _module()
        scratch.install(nvcomp)
        self._nvcomp, self._stream = nvcomp, stream
        self._codec = nvcomp.Codec(
            algorithm="Zstd",
            device_id=with_index(device).index,
            cuda_stream=stream.cuda_stream,
            bitstream_kind=nvcomp.BitstreamKind.RAW,
        )

    def decode(
        self,
        stored: Any,
        stored_offsets: Sequence[int],
        stored_sizes: Sequence[int],
        out: Any,
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Launch the decoding of a batch: of u8 tensors on the device, frame i is `stored_sizes[i]` bytes from
        `stored_offsets[i]` on, and becomes `sizes[i]` bytes of `out` from `offsets[i]` on; offsets are multiples of 16.

        Waits for what was launched on the stream before. torch.OutOfMemoryError where there is no room for scratch.
        """
        stream = self._stream.cuda_stream
        try:
            source = self._nvcomp.as_arrays(stored, list(stored_offsets), list(stored_sizes), cuda_stream=stream)
            target = self._nvcomp.as_arrays(out, list(offsets), list(sizes), cuda_stream=stream)
            self._codec.decode(source, out=target)
        except (RuntimeError, ValueError) as error:
            refused = scratch.take_refusal()
            if refused is not None:
                raise refused from error
            raise BackendUnavailableError(
                "nvCOMP failed to decode a batch of frames whose headers are right", found=error
            ) from error


class Scratch:
    """nvCOMP's device memory, of the whole process: `live_bytes` are held now, `peak_bytes` were held at most."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._lock = threading.Lock()
        self._installed: Any = None
        self._refused = threading.local()

    def install(self, nvcomp: Any) -> None:
        """Have nvCOMP allocate here, from now on. Again is nothing."""
        with self._lock:
            if self._installed is not nvcomp:
                nvcomp.set_device_allocator(self.allocate)
                self._installed = nvcomp

    def allocate(self, nbytes: int, stream: Any) -> ScratchBlock:
        """What nvCOMP calls. An error is kept for `take_refusal`: on its way through C++ it may lose its class."""
        import torch

        try:
            pointer = torch.cuda.caching_allocator_alloc(nbytes, device=stream.device, stream=stream.ptr)
        except RuntimeError as error:
            self._refused.error = error
            raise
        self._count(nbytes)
        return ScratchBlock(self, pointer, nbytes)

    def free(self, pointer: int, nbytes: int) -> None:
        import torch

        torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
        self._count(-nbytes)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.live_bytes

    def take_refusal(self) -> RuntimeError | None:
        """What the last allocation of this thread failed with, once."""
        error, self._refused.error = getattr(self._refused, "error", None), None
        return error

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class ScratchBlock:
    """Freed when nvCOMP drops it. torch hands the memory on to later work of the same stream only."""

    def __init__(self, owner: Scratch, pointer: int, nbytes: int) -> None:
        self._owner, self.ptr, self._nbytes = owner, pointer, nbytes

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self._owner.free(self.ptr, self._nbytes)


scratch = Scratch()


def _module() -> Any:
    from nvidia import nvcomp

    return nvcomp
