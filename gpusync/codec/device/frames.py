"""Frames decoded by nvCOMP, batch by batch, straight into their places in a buffer on the device.

host:     fill pinned 0 | fill pinned 1 | ...
copies:                 | batch 0 up    | batch 1 up | ...
decoding:                               | batch 0    | batch 1 | ...
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from gpusync.codec.device.batches import FrameBatch, cut_batches
from gpusync.codec.device.nvcomp import SCRATCH_PER_BYTE, ZstdCodec, scratch
from gpusync.codec.device.staging import PINNED_BYTES, PinnedRing, event, side_stream, with_index
from gpusync.codec.frame_decoder import MAX_BATCHED_FRAME_BYTES, SCRATCH_BYTES
from gpusync.codec.gf01_layout import max_stored_bytes
from gpusync.codec.stored_frames import OUTPUT_ALIGN, StoredFrame, check_room, check_stored
from gpusync.errors import LayoutError

MIN_SCRATCH_BYTES = 24 << 20
"""Below it a frame of 1 MiB that does not compress would have no room."""


class NvcompFrameDecoder:
    """Decodes on `device`. Each thread has a codec, a pinned ring and two buffers for stored frames of its own, and
    takes at most `scratch_bytes` of device memory beside the output: a quarter for stored frames, the rest for nvCOMP,
    which needs 3.1 bytes for a decoded one.

    What is decoded is there for whatever the calling thread launches next on its current stream.
    """

    def __init__(self, device: Any, *, scratch_bytes: int = SCRATCH_BYTES, pinned_bytes: int = PINNED_BYTES) -> None:
        if scratch_bytes < MIN_SCRATCH_BYTES:
            raise LayoutError("too little scratch for nvCOMP", expected=MIN_SCRATCH_BYTES, found=scratch_bytes)
        self.device = with_index(device)
        self.scratch_bytes, self._pinned_bytes = scratch_bytes, pinned_bytes
        self.stored_bytes = scratch_bytes // 8
        self.batch_bytes = int((scratch_bytes - 2 * self.stored_bytes) / SCRATCH_PER_BYTE)
        self._own = threading.local()

    @property
    def peak_scratch_bytes(self) -> int:
        """nvCOMP's of the whole process, and this thread's buffers for stored frames."""
        return scratch.peak_bytes + (2 * self.stored_bytes if hasattr(self._own, "lane") else 0)

    def decode(self, frames: Iterable[StoredFrame], out: Any) -> None:
        self._check_out(out)
        lane = self._lane()
        batches = cut_batches(
            _checked(frames, int(out.numel())), stored_bytes=self.stored_bytes, decoded_bytes=self.batch_bytes
        )
        with lane:
            for batch in batches:
                lane.decode(batch, out)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self.device, self.stored_bytes, self._pinned_bytes)
        return lane

    def _check_out(self, out: Any) -> None:
        plain = out.element_size() == 1 and out.dim() == 1 and out.is_contiguous()
        if out.device != self.device or not plain or out.data_ptr() % OUTPUT_ALIGN:
            raise LayoutError(
                "output cannot be decoded to",
                expected=f"contiguous bytes on {self.device}, from a multiple of {OUTPUT_ALIGN} on",
                found=f"{out.dtype} {list(out.shape)} on {out.device}",
            )


class _Lane:
    """One thread's way to the device. Two batches are under way: one is sent while the other is decoded."""

    def __init__(self, device: Any, stored_bytes: int, pinned_bytes: int) -> None:
        import torch

        self._device = device
        self._ring = PinnedRing(device, nbytes=pinned_bytes)
        self._stream = side_stream(device)
        self._codec = ZstdCodec(device, self._stream)
        self._stored = [torch.empty(stored_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._decoded = [event() for _ in self._stored]
        self._turn = 0
        self._ring.stream.wait_stream(torch.cuda.current_stream(device))  # on which the buffers were allocated

    def __enter__(self) -> None:
        """The output may have been used by what was launched before."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def __exit__(self, *_: object) -> None:
        """After an error too: what was launched writes to the output still, which must not be reused before."""
        import torch

        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def decode(self, batch: FrameBatch, out: Any) -> None:
        import torch

        stored, decoded = self._stored[self._turn], self._decoded[self._turn]
        self._turn = 1 - self._turn
        self._ring.stream.wait_event(decoded)
        self._ring.send(batch.pieces, stored)
        self._stream.wait_stream(self._ring.stream)
        places, lengths = [at for at, _ in batch.pieces], [len(data) for _, data in batch.pieces]
        with torch.cuda.stream(self._stream):
            try:
                self._codec.decode(stored, places, lengths, out, batch.offsets, batch.sizes)
            finally:
                decoded.record(self._stream)


def _checked(frames: Iterable[StoredFrame], out_bytes: int) -> Iterator[StoredFrame]:
    for frame in frames:
        check_room(frame, out_bytes)
        if frame.nbytes > MAX_BATCHED_FRAME_BYTES or len(frame.stored) > max_stored_bytes(MAX_BATCHED_FRAME_BYTES):
            raise LayoutError(
                "frame is too large for a GPU: it is the host decoder's",
                where=frame.where,
                expected=f"at most {MAX_BATCHED_FRAME_BYTES}",
                found=max(frame.nbytes, len(frame.stored)),
            )
        check_stored(frame)
        yield frame
