"""Decodes GF01 payloads (layout in `gf01_layout`) on the host.

Raw bytes by transform: 0 xor, `new ^ old`; 1 step planes, the zig-zag coded steps from old words to new ones; 2 full
planes, the new words; 3 full, the new bytes as they are. Plane p holds bits 8p..8p+7 of every word; planes stand one
after the other, least significant first.
Frames are independent: only those a window touches are decoded, and each only once for windows that come in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import zstandard

from gpusync.codec.frame_header import MAX_FRAME_HEADER_BYTES, MAX_WINDOW_SIZE, check_frame, frame_info
from gpusync.codec.gf01_encode import encode_gf01
from gpusync.codec.gf01_layout import (
    FULL,
    FULL_PLANES,
    GF01_MAGIC,
    STEP_PLANES,
    TRANSFORM_NAMES,
    XOR,
    Gf01Layout,
    plane_count,
    read_layout,
)
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import WindowOrder, pieces
from gpusync.errors import NOWHERE, LayoutError, PayloadError, Where
from gpusync_kernels.word_order import from_order, to_order, unzigzag

__all__ = [
    "FULL",
    "FULL_PLANES",
    "GF01_MAGIC",
    "STEP_PLANES",
    "TRANSFORM_NAMES",
    "XOR",
    "Gf01Decoder",
    "encode_gf01",
]

_CHUNK_BYTES = 256 << 10
_STRETCH = 1 << 16  # elements


class Gf01Decoder:
    """Makes new bytes of old ones (xor, step planes), or writes new ones (full planes, full), window by window.

    The header, the table of frames and all padding are checked when it is opened, each frame just before it is used.
    Holds, for each plane, one decoded frame and one chunk of stored bytes. `transform`, `element_bytes`, `float_order`
    and `raw_bytes` are those of `payload`; `read_raw` gives what it decodes to before it is applied.
    """

    def __init__(self, payload: Payload, *, nbytes: int, element_bytes: int, where: Where = NOWHERE) -> None:
        self.payload = payload
        layout = read_layout(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
        self.transform, self.raw_bytes = layout.transform, layout.raw_bytes
        self.element_bytes, self.float_order = layout.element_bytes, layout.float_order
        self.needs_base = layout.transform in (XOR, STEP_PLANES)
        self.unit_bytes = layout.element_bytes if layout.transform == STEP_PLANES else 1
        self._layout = layout
        self._where = where
        self._order = WindowOrder(nbytes=nbytes, unit_bytes=self.unit_bytes, where=where)
        self._planes = [_RawReader(payload, layout, where) for _ in range(plane_count(layout))]
        self._words = np.empty(0, np.uint8)
        self._steps = np.empty(0, np.uint8)

    def apply(self, window: U8, offset: int) -> None:
        self._order.advance(window, offset)
        for piece, start in pieces(window, offset):
            if self.transform == STEP_PLANES:
                self._add_steps(piece, start)
            elif len(self._planes) > 1:
                self._join_planes(piece, start)
            else:
                self._apply_flat(piece, start)

    def finish(self) -> None:
        self._order.finish()

    def read_raw(self, offset: int, out: U8) -> None:
        """Fills `out` with the raw bytes [offset, offset + len(out)): planes one after the other, xor or full bytes.

        Independent of the windows. Raises `PayloadError`, `LayoutError` for a range outside.
        """
        if offset < 0 or offset + len(out) > self.raw_bytes:
            raise LayoutError(
                "raw bytes outside the tensor", where=self._where, expected=f"at most {self.raw_bytes}",
                found=offset + len(out),
            )  # fmt: skip
        at = 0
        for raw in self._planes[0].read(offset, len(out)):
            out[at : at + len(raw)] = raw
            at += len(raw)

    def _add_steps(self, piece: U8, start: int) -> None:
        if len(self._steps) < len(piece):
            self._steps = np.empty(len(piece), np.uint8)
        coded = self._steps[: len(piece)]
        self._join_planes(coded, start)
        kind, order = f"<u{self.element_bytes}", int(self.float_order)
        words = piece.view(kind)
        for at in range(0, len(words), _STRETCH):  # what is computed on the way stays small
            some = words[at : at + _STRETCH]
            steps = unzigzag(coded.view(kind)[at : at + _STRETCH])
            some[:] = from_order(to_order(some, order) + steps, order)

    def _apply_flat(self, piece: U8, start: int) -> None:
        at = 0
        for raw in self._planes[0].read(start, len(piece)):
            target = piece[at : at + len(raw)]
            if self._layout.transform == XOR:
                np.bitwise_xor(target, raw, out=target)
            else:
                target[:] = raw
            at += len(raw)

    def _join_planes(self, piece: U8, start: int) -> None:
        """Windows may cut elements: whole ones are joined, and what the window shows of them is copied."""
        es = self._layout.element_bytes
        first, behind = start // es, -(-(start + len(piece)) // es)
        nbytes = (behind - first) * es
        if len(self._words) < nbytes:
            self._words = np.empty(nbytes, np.uint8)
        exact = nbytes == len(piece)
        words = (piece if exact else self._words[:nbytes]).reshape(-1, es)
        for plane, reader in enumerate(self._planes):
            raw_offset, at = plane * (self._layout.raw_bytes // es) + first, 0
            for raw in reader.read(raw_offset, len(words)):
                _set_plane(words[at : at + len(raw)], plane, raw)
                at += len(raw)
        if not exact:
            piece[:] = words.reshape(-1)[start - first * es :][: len(piece)]


def _set_plane(words: U8, plane: int, raw: U8) -> None:
    """Sets byte `plane` of every word; planes come in order from 0. Two-byte words are set whole: twice as fast."""
    if words.shape[1] != 2:
        words[:, plane] = raw
        return
    whole = words.reshape(-1).view("<u2")
    if plane == 0:
        whole[:] = raw
    else:
        np.bitwise_or(whole, np.multiply(raw, np.uint16(256)), out=whole)


class _RawReader:
    """Reads raw bytes of a payload by decoding frames, remembering the last one: neighbouring windows share it."""

    def __init__(self, payload: Payload, layout: Gf01Layout, where: Where) -> None:
        self._payload = payload
        self._layout = layout
        self._where = where
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_SIZE)
        self._frame, self._decoded = -1, np.empty(0, np.uint8)
        self._chunk_offset, self._chunk = 0, np.empty(0, np.uint8)

    def read(self, offset: int, nbytes: int) -> Iterator[U8]:
        """The raw bytes [offset, offset + nbytes) as consecutive pieces, each valid until the next step only."""
        stop = offset + nbytes
        while offset < stop:
            frame, inside = divmod(offset, self._layout.frame_bytes)
            raw = self._decode(frame)[inside : inside + stop - offset]
            yield raw
            offset += len(raw)

    def _decode(self, frame: int) -> U8:
        if frame != self._frame:
            stored = self._stored(frame)
            try:
                size = self._layout.decoded_bytes(frame)
                check_frame(frame_info(stored[:MAX_FRAME_HEADER_BYTES], where=self._where), content_size=size)
                raw = self._decompressor.decompress(stored, allow_extra_data=False)
            except PayloadError as error:
                raise self._damaged(frame, error.what, error.expected, error.found) from error
            except zstandard.ZstdError as error:
                raise self._damaged(frame, str(error)) from error
            if len(raw) != size:  # `read` would go round for ever on a frame that gives nothing
                raise self._damaged(frame, "decodes to another size", size, len(raw))
            self._frame, self._decoded = frame, np.frombuffer(raw, np.uint8)
        return self._decoded

    def _stored(self, frame: int) -> memoryview:
        """A frame as stored, from a chunk that is read ahead over its successors."""
        offsets = self._layout.frame_offsets
        start, stop = int(offsets[frame]), int(offsets[frame + 1])
        if start < self._chunk_offset or stop > self._chunk_offset + len(self._chunk):
            end = max(stop, min(start + _CHUNK_BYTES, int(offsets[-1])))
            self._chunk_offset, self._chunk = start, np.empty(end - start, np.uint8)
            self._payload.read_into(start, as_bytes(self._chunk))
        return as_bytes(self._chunk[start - self._chunk_offset : stop - self._chunk_offset])

    def _damaged(self, frame: int, what: str, expected: object = None, found: object = None) -> PayloadError:
        return PayloadError(f"GF01 frame {frame}: {what}", where=self._where, expected=expected, found=found)
