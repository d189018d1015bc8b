"""Raw bytes of a GF01 payload, decoded where they are wanted: on the host by zstandard."""

from __future__ import annotations

from typing import Any, Protocol

import zstandard

from gpusync.codec import Gf01Layout, frame_info
from gpusync.codec.frame_header import MAX_FRAME_HEADER_BYTES, MAX_WINDOW_SIZE, check_frame
from gpusync.codec.payload import U8
from gpusync.errors import PayloadError, Where
from gpusync_kernels.buffers import byte_view


class RangeDecoder(Protocol):
    """Decodes what is asked for, and nothing else."""

    def decode_range(
        self, payload: U8, layout: Gf01Layout, span: tuple[int, int], target: Any, *, where: Where
    ) -> None:
        """Fills `target` with the raw bytes [span[0], span[1]) of a payload, which lies in host memory and whose
        checksum was compared. Raises PayloadError for a damaged frame."""
        ...


class HostRangeDecoder:
    def decode_range(
        self, payload: U8, layout: Gf01Layout, span: tuple[int, int], target: Any, *, where: Where
    ) -> None:
        out, (start, stop) = byte_view(target), span
        context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_SIZE)
        for frame in range(start // layout.frame_bytes, -(-stop // layout.frame_bytes)):
            first = frame * layout.frame_bytes
            raw = _decode(payload, layout, frame, context, where)
            low, high = max(start, first), min(stop, first + len(raw))
            out[low - start : high - start] = memoryview(raw)[low - first : high - first]


def _decode(payload: U8, layout: Gf01Layout, frame: int, context: Any, where: Where) -> bytes:
    stored = memoryview(payload[int(layout.frame_offsets[frame]) : int(layout.frame_offsets[frame + 1])])
    size = layout.decoded_bytes(frame)
    try:
        check_frame(frame_info(stored[:MAX_FRAME_HEADER_BYTES], where=where), content_size=size)
        raw: bytes = context.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"GF01 frame {frame}: {error}", where=where) from error
    if len(raw) != size:
        raise PayloadError(f"GF01 frame {frame} decodes to another size", where=where, expected=size, found=len(raw))
    return raw
