"""Batches of zstd frames decoded into one buffer: one interface, on the host by libzstd, on a GPU by nvCOMP.

encoding of the payload    frames                       decoder
gpusync (GF01)             many, 64 KiB to 1 MiB each   the one that was chosen
xor, overwrite (slime's)   one, of the whole tensor     the host's
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import numpy as np
import zstandard

from gpusync.codec.frame_header import MAX_WINDOW_SIZE
from gpusync.codec.frames import FrameReader
from gpusync.codec.gf01_layout import MAX_FRAME_LOG2
from gpusync.codec.payload import U8, MemoryPayload
from gpusync.codec.stored_frames import StoredFrame, check_room, check_stored
from gpusync.errors import BackendUnavailableError, PayloadError
from gpusync_kernels.buffers import byte_view

MAX_BATCHED_FRAME_BYTES = 1 << MAX_FRAME_LOG2
SCRATCH_BYTES = 512 << 20

Want = Literal["auto", "gpu", "cpu"]


class FrameDecoder(Protocol):
    """Decodes frames of any number of tensors, in the order in which they come.

    `decode` writes each frame where it says, into `out`: bytes, contiguous, where `device` is (None: host memory, a
    numpy array or a torch CPU tensor). Nothing else of `out` is written. On an error `out` is neither old nor new: it
    is scratch, never a live tensor. Frames are taken one at a time. What is not one zstd frame of the expected size,
    by its headers, is a PayloadError; one that leaves `out`, or lies there at no multiple of 16, a LayoutError.

    What is damaged inside of a frame, libzstd notices; a GPU decoder's behaviour on it is undefined. So the caller
    verifies the stored payloads' checksums before their frames come here, and digests what came out afterwards.
    """

    @property
    def device(self) -> Any | None: ...

    @property
    def peak_scratch_bytes(self) -> int:
        """The most memory, where the output is, that was taken beside it."""
        ...

    def decode(self, frames: Iterable[StoredFrame], out: Any) -> None: ...


class HostFrameDecoder:
    """libzstd, one frame at a time. Any number of threads may decode at once. A frame of more than 1 MiB goes straight
    to where it belongs, from bounded chunks; smaller ones take a copy of themselves, and half the time.
    """

    device = None

    def __init__(self) -> None:
        self.peak_scratch_bytes = 0
        self._own = threading.local()

    def decode(self, frames: Iterable[StoredFrame], out: Any) -> None:
        target = byte_view(out)
        for frame in frames:
            check_room(frame, len(target))
            room = target[frame.offset : frame.offset + frame.nbytes]
            if frame.nbytes > MAX_BATCHED_FRAME_BYTES:
                reader = FrameReader(MemoryPayload(frame.stored), content_size=frame.nbytes, where=frame.where)
                reader.read_into(room)
                reader.finish()
            else:
                room[:] = self._decoded(frame)

    def _decoded(self, frame: StoredFrame) -> U8:
        check_stored(frame)
        try:
            raw = self._decompressor().decompress(frame.stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PayloadError(f"zstd frame is damaged ({error})", where=frame.where) from error
        if len(raw) != frame.nbytes:
            raise PayloadError(
                "zstd frame decodes to another size", where=frame.where, expected=frame.nbytes, found=len(raw)
            )
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, len(raw))
        return np.frombuffer(raw, np.uint8)

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        made: zstandard.ZstdDecompressor | None = getattr(self._own, "decompressor", None)
        if made is None:
            made = self._own.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_SIZE)
        return made


def choose_frame_decoder(
    device: Any | None, want: Want = "auto", *, scratch_bytes: int = SCRATCH_BYTES
) -> tuple[FrameDecoder, str]:
    """The decoder of framed payloads for a rank whose params are on `device` (None: host memory), and why this one.

    `scratch_bytes` bounds the device memory that a thread's decoding takes beside its output. BackendUnavailableError,
    naming what is missing, where a GPU decoder is demanded and cannot be had.
    """
    if want not in ("auto", "gpu", "cpu"):
        raise BackendUnavailableError("unknown frame decoder", expected="auto, gpu or cpu", found=want)
    if want == "cpu":
        return HostFrameDecoder(), "libzstd on the host, as asked for"
    missing = _missing(device)
    if missing is None:
        from gpusync.codec.device.frames import NvcompFrameDecoder
        from gpusync.codec.device.nvcomp import version

        decoder = NvcompFrameDecoder(device, scratch_bytes=scratch_bytes)
        return decoder, f"nvCOMP {version()} on {decoder.device}"
    if want == "gpu":
        raise BackendUnavailableError("frames cannot be decoded on a GPU", expected="nvCOMP", found=missing)
    return HostFrameDecoder(), f"libzstd on the host: {missing}"


def choose_payload_decoder(encoding: str, chosen: FrameDecoder) -> tuple[FrameDecoder, str]:
    """The decoder of one payload by its encoding, where `chosen` is what `choose_frame_decoder` gave; and why."""
    if chosen.device is None or encoding == "gpusync":
        return chosen, f"{encoding} payloads go to the chosen decoder"
    return HostFrameDecoder(), (
        f"{encoding} payloads go to the host: each is one zstd frame, which a GPU decodes on one multiprocessor, "
        "and may come without a checksum of the stored bytes"
    )


def _missing(device: Any | None) -> str | None:
    """What keeps nvCOMP from decoding to this device; None if nothing does."""
    if device is None or str(device).startswith("cpu"):
        return "params are in host memory"
    from gpusync.codec.device.nvcomp import why_unavailable

    return why_unavailable(device)
