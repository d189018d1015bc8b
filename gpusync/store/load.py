"""Bringing steps to where the params are: of each step what a span of its tensor needs, in the form a kernel takes.

Sparse words and GS01 blobs take memory proportional to what changed and may stay until the commit. Plain bytes and the
planes of a GF01 take as much as the span itself: they are loaded when they are applied, and dropped after it, unless
they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpusync.codec import FULL_PLANES, STEP_PLANES, MemoryPayload, read_gf01_layout
from gpusync.codec import XOR as XOR_TRANSFORM
from gpusync.errors import Where
from gpusync.store.compact import Step, StepFiles, Window
from gpusync.store.memory import Memory
from gpusync_kernels import Blob, Planes, parse_blob
from gpusync_kernels.placed import element_rows, locate
from gpusync_kernels.segments import Rows, merge_rows

Buffer = Any
Span = tuple[int, int]
Action = Literal["xor words", "overwrite words", "xor bytes", "copy bytes", "steps", "step planes", "full planes"]

MASKED_SEGMENTS = 64
"""Of a tensor in more segments than this all changed words of its span are kept, not only the held ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseWords:
    """Words at positions. `old` receives what an overwrite replaces."""

    first_element: int
    positions: Buffer
    words: Buffer
    old: Buffer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBytes:
    """Bytes [offset, offset + nbytes) of the tensor."""

    offset: int
    nbytes: int
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSteps:
    """A GS01 blob."""

    blob: Blob
    data: Buffer
    host: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneWords:
    """Byte planes of the elements from byte `offset` of the tensor on."""

    offset: int
    planes: Planes


Part = SparseWords | PlainBytes | SparseSteps | PlaneWords


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStep:
    """A step of a span, where the params are. `nbytes` is what it takes there."""

    action: Action
    word_bytes: int
    parts: Sequence[Part]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Loads from the files of this host into one memory."""

    files: StepFiles
    memory: Memory

    def load(self, step: Step, *, tensor_bytes: int, rows: Rows, where: Where) -> list[LoadedStep]:
        """What `step` does to the bytes that `rows` (segments of this tensor) hold, to be applied in order.

        Raises PayloadError for a frame that is damaged.
        """
        span = span_of(rows)
        if step.kind == "gs01":
            return [self._load_blob(step)]
        if step.kind == "gf01":
            return [self._load_frames(step, span, tensor_bytes, where)]
        touched = [w for w in step.windows if w.offset < span[1] and w.offset + w.nbytes > span[0]]
        sparse = [self._load_words(step, w, rows, tensor_bytes) for w in touched if w.is_sparse]
        plain = [self._load_bytes(step, w, span) for w in touched if not w.is_sparse]
        words: Action = "overwrite words" if step.kind == "overwrite" else "xor words"
        whole: Action = "xor bytes" if step.kind == "xor" else "copy bytes"
        loaded = [(words, [each for each in sparse if each is not None]), (whole, plain)]
        return [self._step(action, step.word_bytes, parts) for action, parts in loaded if parts]

    def _step(self, action: Action, word_bytes: int, parts: Sequence[Part]) -> LoadedStep:
        return LoadedStep(
            action=action, word_bytes=word_bytes, parts=tuple(parts), nbytes=sum(_bytes_of(part) for part in parts)
        )

    def _load_words(self, step: Step, window: Window, rows: Rows, tensor_bytes: int) -> SparseWords | None:
        positions, words = self.files.positions(window), self.files.words(step, window)
        first = window.offset // step.word_bytes
        held = _held(positions, first, rows, step.word_bytes, tensor_bytes)
        if held is not None:
            positions, words = positions[held], words[held]
        if not len(positions):
            return None
        loaded = self.memory.upload(words)
        old = self.memory.zeros_like(loaded) if step.kind == "overwrite" else None
        return SparseWords(first_element=first, positions=self.memory.upload(positions), words=loaded, old=old)

    def _load_bytes(self, step: Step, window: Window, span: Span) -> PlainBytes:
        start, stop = max(window.offset, span[0]), min(window.offset + window.nbytes, span[1])
        data = self.files.read(step, window.words_at + start - window.offset, stop - start)
        return PlainBytes(offset=start, nbytes=stop - start, data=self.memory.upload(data))

    def _load_blob(self, step: Step) -> LoadedStep:
        host = self.files.payload(step)
        part = SparseSteps(blob=parse_blob(memoryview(host), len(host)), data=self.memory.upload(host), host=host)
        return self._step("steps", step.word_bytes, [part])

    def _load_frames(self, step: Step, span: Span, tensor_bytes: int, where: Where) -> LoadedStep:
        """Only the frames that hold something of the span are decoded."""
        payload, width = self.files.payload(step), step.word_bytes
        source = MemoryPayload(payload)
        layout = read_gf01_layout(source, nbytes=tensor_bytes, element_bytes=width, where=where)
        decode = self.memory.frames
        if layout.transform in (STEP_PLANES, FULL_PLANES):
            first, stop = span[0] // width, -(-span[1] // width)
            raw = self.memory.empty((stop - first) * width)
            for plane in range(width):
                at = plane * (tensor_bytes // width)
                target = raw[plane * (stop - first) : (plane + 1) * (stop - first)]
                decode.decode_range(payload, layout, (at + first, at + stop), target, where=where)
            planes = PlaneWords(
                offset=first * width, planes=Planes(data=raw, element_bytes=width, order=int(layout.float_order))
            )
            action: Action = "step planes" if layout.transform == STEP_PLANES else "full planes"
            return self._step(action, width, [planes])
        data = self.memory.empty(span[1] - span[0])
        decode.decode_range(payload, layout, span, data, where=where)
        part = PlainBytes(offset=span[0], nbytes=span[1] - span[0], data=data)
        return self._step("xor bytes" if layout.transform == XOR_TRANSFORM else "copy bytes", width, [part])


def span_of(rows: Rows) -> Span:
    """The first byte of a tensor that segments of it hold, and one past the last."""
    stop = rows["src_offset"] + (rows["rows"] - 1) * rows["src_stride"] + rows["row_bytes"]
    return int(rows["src_offset"].min()), int(stop.max())


def is_dense(step: Step) -> bool:
    """Whether the step takes memory in proportion to the tensor, not to what changed."""
    return step.kind in ("full", "gf01") or any(not window.is_sparse for window in step.windows)


def _held(
    positions: npt.NDArray[np.uint32], first: int, rows: Rows, word_bytes: int, tensor_bytes: int
) -> slice | npt.NDArray[np.bool_] | None:
    """Which of a window's positions segments hold: all (None), a run of them, or a mask."""
    if int((rows["rows"] * rows["row_bytes"]).sum()) >= tensor_bytes:
        return None
    start, stop = span_of(rows)
    low, high = (
        int(np.searchsorted(positions, np.uint32(max(at - first, 0))))
        for at in (start // word_bytes, -(-stop // word_bytes))
    )
    if (len(rows) == 1 and rows["rows"][0] == 1) or len(rows) > MASKED_SEGMENTS:
        return slice(low, high)
    mask = np.zeros(len(positions), bool)
    near = positions[low:high].astype(np.int64) + first
    for segment in element_rows(merge_rows(rows), word_bytes):
        held, _ = locate(near, segment, word_bytes)
        mask[low:high][held] = True
    return mask


def _bytes_of(part: Part) -> int:
    if isinstance(part, SparseWords):
        return sum(int(each.nbytes) for each in (part.positions, part.words, part.old) if each is not None)
    return int(part.planes.data.nbytes if isinstance(part, PlaneWords) else part.data.nbytes)
