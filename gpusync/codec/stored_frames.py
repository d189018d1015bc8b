"""zstd frames on their way to a decoder: as stored, and where their bytes go. Checked here, decoded elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpusync.codec.frame_header import MAX_FRAME_HEADER_BYTES, BlockWalker, check_frame, frame_info
from gpusync.codec.gf01_layout import Gf01Layout
from gpusync.codec.payload import Payload, as_bytes
from gpusync.errors import NOWHERE, LayoutError, PayloadError, Where

OUTPUT_ALIGN = 16
"""Frames are written to multiples of it: more than any decoder asks for."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFrame:
    """One frame, that decodes to bytes [offset, offset + nbytes) of the output. `stored` stays as it is for as long as
    the frame is kept.
    """

    stored: memoryview
    nbytes: int
    offset: int
    where: Where = NOWHERE


def gf01_frames(payload: Payload, layout: Gf01Layout, *, offset: int, where: Where = NOWHERE) -> Iterator[StoredFrame]:
    """All frames of a payload, in order, to be decoded from byte `offset` of the output on.

    `layout` is what `read_layout` made of the payload, of which about 1 MiB is read at a time.
    """
    bounds = layout.frame_offsets
    first = 0
    while first < layout.frame_count:
        stop = int(np.searchsorted(bounds, bounds[first] + _READ_BYTES, "right")) - 1
        stop = min(max(stop, first + 1), layout.frame_count)
        chunk = np.empty(int(bounds[stop] - bounds[first]), np.uint8)
        payload.read_into(int(bounds[first]), as_bytes(chunk))
        for frame in range(first, stop):
            begin, end = int(bounds[frame] - bounds[first]), int(bounds[frame + 1] - bounds[first])
            yield StoredFrame(
                stored=as_bytes(chunk[begin:end]),
                nbytes=layout.decoded_bytes(frame),
                offset=offset + frame * layout.frame_bytes,
                where=where,
            )
        first = stop


def check_stored(frame: StoredFrame) -> None:
    """Refuses what is not one zstd frame, from its first byte to its last, of the size that is expected of it.

    Reads headers only: what is damaged inside a block passes. Raises PayloadError.
    """
    info = frame_info(frame.stored[:MAX_FRAME_HEADER_BYTES], where=frame.where)
    check_frame(info, content_size=frame.nbytes, where=frame.where)
    walker = BlockWalker(info, where=frame.where)
    walker.feed(frame.stored, 0)
    if walker.end != len(frame.stored):
        raise PayloadError(
            "zstd frame does not end where it is stored to end",
            where=frame.where,
            expected=len(frame.stored),
            found="more" if walker.end is None else walker.end,
        )


def check_room(frame: StoredFrame, out_bytes: int) -> None:
    """Raises LayoutError unless the frame's bytes belong inside an output of `out_bytes` bytes, and are aligned."""
    if frame.offset < 0 or frame.offset + frame.nbytes > out_bytes:
        raise LayoutError(
            "frame leaves the output", where=frame.where, expected=out_bytes, found=frame.offset + frame.nbytes
        )
    if frame.offset % OUTPUT_ALIGN:
        raise LayoutError(
            "frame is not aligned", where=frame.where, expected=f"a multiple of {OUTPUT_ALIGN}", found=frame.offset
        )
