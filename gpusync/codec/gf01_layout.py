"""The layout of GF01: framed zstd, what a batched GPU decoder takes. Little-endian:

`"GF01" | transform u1 | es u1 | order u1 | log2(frame_bytes) u1 | raw_bytes u8 | frames u4 | 0 u4 | frame size u4 ×
frames | zero pad to 8 | frames, back to back | zero pad to 8`

The frames hold `raw_bytes` bytes, the tensor's size, cut every `frame_bytes`; each is one independent zstd frame with
content size and no dictionary. No bytes: no frames, the payload is these 24 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusync.codec.payload import Payload, as_bytes, read_head
from gpusync.errors import NOWHERE, PayloadError, Where

GF01_MAGIC = b"GF01"
XOR, STEP_PLANES, FULL_PLANES, FULL = range(4)
TRANSFORM_NAMES = ("xor", "step planes", "full planes", "full")
MIN_FRAME_LOG2, MAX_FRAME_LOG2 = 16, 20

_HEADER = struct.Struct("<4s4B2Q")
HEADER_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Gf01Layout:
    """A checked header. Frame i is the payload's bytes [frame_offsets[i], frame_offsets[i + 1])."""

    transform: int
    element_bytes: int
    float_order: bool
    frame_bytes: int
    raw_bytes: int
    frame_offsets: npt.NDArray[np.int64]

    @property
    def frame_count(self) -> int:
        return len(self.frame_offsets) - 1

    def decoded_bytes(self, frame: int) -> int:
        """The content size of a frame: `frame_bytes`, the last one the rest."""
        return min(self.frame_bytes, self.raw_bytes - frame * self.frame_bytes)


def plane_count(layout: Gf01Layout) -> int:
    """1 where elements are not split into planes."""
    return layout.element_bytes if layout.transform in (STEP_PLANES, FULL_PLANES) else 1


def max_stored_bytes(frame_bytes: int) -> int:
    """More than any encoder needs for a frame; a stored frame above it is refused before memory is taken for it."""
    return 2 * frame_bytes + 1024


def read_layout(payload: Payload, *, nbytes: int, element_bytes: int, where: Where = NOWHERE) -> Gf01Layout:
    """Checks all of a payload but its frames, for a tensor of `nbytes` bytes. Raises `PayloadError`."""
    head = read_head(payload, HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise PayloadError("GF01 header is cut", where=where, expected=HEADER_BYTES, found=len(head))
    magic, transform, es, order, log2, raw_bytes, tail = _HEADER.unpack(head)
    frames, reserved = tail & 0xFFFFFFFF, tail >> 32
    _expect(magic, GF01_MAGIC, "magic", where)
    _expect(transform, range(len(TRANSFORM_NAMES)), "transform", where)
    _expect(es, element_bytes, "element size", where)
    _expect(order, range(2), "order", where)
    _expect(log2, range(MIN_FRAME_LOG2, MAX_FRAME_LOG2 + 1), "log2 of frame_bytes", where)
    _expect(raw_bytes, nbytes, "raw_bytes", where)
    _expect(raw_bytes % es, 0, "rest of raw_bytes in elements", where)
    _expect(frames, -(-raw_bytes >> log2), "number of frames", where)
    _expect(reserved, 0, "reserved field", where)
    offsets = _read_frame_offsets(payload, frames, max_stored_bytes(1 << log2), where)
    return Gf01Layout(
        transform=transform,
        element_bytes=es,
        float_order=bool(order),
        frame_bytes=1 << log2,
        raw_bytes=raw_bytes,
        frame_offsets=offsets,
    )


def encode_layout(
    *, transform: int, element_bytes: int, float_order: bool, frame_bytes: int, raw_bytes: int, sizes: list[int]
) -> bytes:
    """Header, frame sizes and the padding behind them."""
    log2 = frame_bytes.bit_length() - 1
    head = _HEADER.pack(GF01_MAGIC, transform, element_bytes, int(float_order), log2, raw_bytes, len(sizes))
    table = np.array(sizes, "<u4").tobytes()
    return head + table + bytes(padding(HEADER_BYTES + len(table)))


def padding(nbytes: int) -> int:
    """Bytes that are missing to the next multiple of 8."""
    return -nbytes % 8


def _read_frame_offsets(payload: Payload, frames: int, most: int, where: Where) -> npt.NDArray[np.int64]:
    table_end = HEADER_BYTES + 4 * frames
    first = table_end + padding(table_end)
    if payload.nbytes < first:
        raise PayloadError("GF01 table of frame sizes is cut", where=where, expected=first, found=payload.nbytes)
    table = np.empty(first - HEADER_BYTES, np.uint8)
    payload.read_into(HEADER_BYTES, as_bytes(table))
    sizes = table[: 4 * frames].view("<u4")
    if frames and int(sizes.max()) > most:
        raise PayloadError(
            "GF01 frame is larger than it can be", where=where, expected=f"at most {most}", found=sizes.max()
        )
    offsets = np.full(frames + 1, first, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += first
    end = int(offsets[-1])
    _expect(payload.nbytes, end + padding(end), "payload length", where)
    pad = np.zeros(padding(end), np.uint8)
    payload.read_into(end, as_bytes(pad))
    if table[4 * frames :].any() or pad.any():
        raise PayloadError("GF01 padding is not zero", where=where)
    return offsets


def _expect(found: object, expected: object, field: str, where: Where) -> None:
    if found == expected or (isinstance(expected, range) and found in expected):
        return
    told = f"{expected.start}..{expected.stop - 1}" if isinstance(expected, range) else expected
    raise PayloadError(f"GF01 payload with a wrong {field}", where=where, expected=told, found=found)
