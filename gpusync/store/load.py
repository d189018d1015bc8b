"""Bringing steps to where the params are: of each step what a span of its tensor needs, in the form a kernel takes.

Sparse words and GS01 blobs take memory proportional to what changed and may stay until the commit. Plain bytes and the
planes of a GF01 take as much as the span itself: they are loaded when they are applied, and dropped after it, unless
they are small. All that is loaded together goes there in one transfer, and all frames are decoded in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpusync.codec import FULL_PLANES, STEP_PLANES, Gf01Layout, MemoryPayload, read_gf01_layout
from gpusync.codec import XOR as XOR_TRANSFORM
from gpusync.codec.stored_frames import StoredFrame
from gpusync.errors import Where
from gpusync.store.compact import Bytes, Step, StepFiles, Window
from gpusync.store.memory import Memory
from gpusync_kernels import Blob, Planes, SegmentTable, bind_moves, copy_segments, parse_blobs
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
    host: Bytes


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
class Request:
    """`step`, for the bytes that `rows`, segments of tensor `number` of `tensor_bytes` bytes, hold."""

    number: int
    step: Step
    tensor_bytes: int
    rows: Rows
    where: Where


def load(requests: Sequence[Request], files: StepFiles, memory: Memory) -> dict[int, list[LoadedStep]]:
    """By tensor number what its step does, to be applied in order. Raises PayloadError for a frame that is damaged."""
    work = _Loading(files, memory)
    made = {request.number: work.plan(request) for request in requests}
    work.send()
    return {number: [step() for step in steps] for number, steps in made.items()}


def dense_bytes(step: Step, tensor_bytes: int) -> int:
    """How much of a tensor the step takes memory for as a whole, not in proportion to what changed."""
    if step.kind in ("full", "gf01"):
        return tensor_bytes
    return sum(window.nbytes for window in step.windows if not window.is_sparse)


def is_dense(step: Step) -> bool:
    return dense_bytes(step, 1) > 0


def span_of(rows: Rows) -> Span:
    """The first byte of a tensor that segments of it hold, and one past the last."""
    stop = rows["src_offset"] + (rows["rows"] - 1) * rows["src_stride"] + rows["row_bytes"]
    return int(rows["src_offset"].min()), int(stop.max())


MakeStep = Callable[[], LoadedStep]
MakePart = Callable[[], Part]


@dataclass(slots=True)
class _Loading:
    """What is to be sent and decoded is collected first; then each part takes its own."""

    files: StepFiles
    memory: Memory
    arrays: list[npt.NDArray[Any]] = field(default_factory=list)
    payloads: list[Bytes] = field(default_factory=list)
    frames: list[StoredFrame] = field(default_factory=list)
    raw_bytes: int = 0
    uploaded: list[Buffer] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    raw: Buffer = None

    def send(self) -> None:
        self.uploaded = self.memory.upload_all(self.arrays)
        self.blobs = parse_blobs([(memoryview(payload), len(payload)) for payload in self.payloads])
        if self.frames:
            self.raw = self.memory.empty(self.raw_bytes)
            self.memory.decoder.decode(self.frames, self.raw)

    def plan(self, request: Request) -> list[MakeStep]:
        step = request.step
        if step.kind == "gs01":
            return [self._step("steps", step, [self._blob(step)])]
        if step.kind == "gf01":
            return [self._framed(request)]
        span = span_of(request.rows)
        touched = [w for w in step.windows if w.offset < span[1] and w.offset + w.nbytes > span[0]]
        sparse = [part for w in touched if w.is_sparse for part in self._words(request, w)]
        plain = [self._bytes(step, w, span) for w in touched if not w.is_sparse]
        words: Action = "overwrite words" if step.kind == "overwrite" else "xor words"
        whole: Action = "xor bytes" if step.kind == "xor" else "copy bytes"
        return [self._step(action, step, parts) for action, parts in ((words, sparse), (whole, plain)) if parts]

    def _step(self, action: Action, step: Step, parts: Sequence[MakePart]) -> MakeStep:
        def make() -> LoadedStep:
            made = tuple(part() for part in parts)
            nbytes = sum(map(_bytes_of, made))
            return LoadedStep(action=action, word_bytes=step.word_bytes, parts=made, nbytes=nbytes)

        return make

    def _later(self, array: npt.NDArray[Any]) -> Callable[[], Buffer]:
        number = len(self.arrays)
        self.arrays.append(array)
        return lambda: self.uploaded[number]

    def _words(self, request: Request, window: Window) -> Iterator[MakePart]:
        step = request.step
        positions, words = self.files.positions(window), self.files.words(step, window)
        first = window.offset // step.word_bytes
        held = _held(positions, first, request.rows, step.word_bytes, request.tensor_bytes)
        if held is not None:
            positions, words = positions[held], words[held]
        if not len(positions):
            return
        positions_there, words_there = self._later(positions), self._later(words)

        def make() -> Part:
            old = self.memory.zeros_like(words_there()) if step.kind == "overwrite" else None
            return SparseWords(first_element=first, positions=positions_there(), words=words_there(), old=old)

        yield make

    def _bytes(self, step: Step, window: Window, span: Span) -> MakePart:
        start, stop = max(window.offset, span[0]), min(window.offset + window.nbytes, span[1])
        data = self._later(self.files.read(step, window.words_at + start - window.offset, stop - start))
        return lambda: PlainBytes(offset=start, nbytes=stop - start, data=data())

    def _blob(self, step: Step) -> MakePart:
        number, host = len(self.payloads), self.files.payload(step)
        self.payloads.append(host)
        data = self._later(host)
        return lambda: SparseSteps(blob=self.blobs[number], data=data(), host=host)

    def _framed(self, request: Request) -> MakeStep:
        """Only the frames that hold something of the span are decoded."""
        step, width = request.step, request.step.word_bytes
        payload, span = self.files.payload(step), span_of(request.rows)
        layout = read_gf01_layout(
            MemoryPayload(payload), nbytes=request.tensor_bytes, element_bytes=width, where=request.where
        )
        if layout.transform not in (STEP_PLANES, FULL_PLANES):
            at, first, stop = self._decode(payload, layout, span, request.where)
            action: Action = "xor bytes" if layout.transform == XOR_TRANSFORM else "copy bytes"
            return self._step(
                action,
                step,
                [lambda: PlainBytes(offset=first, nbytes=stop - first, data=self.raw[at : at + stop - first])],
            )
        low, high = span[0] // width, -(-span[1] // width)
        elements = request.tensor_bytes // width
        ranges = [
            self._decode(payload, layout, (plane * elements + low, plane * elements + high), request.where)
            for plane in range(width)
        ]
        order = int(layout.float_order)
        action = "step planes" if layout.transform == STEP_PLANES else "full planes"
        return self._step(action, step, [lambda: self._planes(ranges, (low, high), elements, width, order)])

    def _planes(
        self, ranges: Sequence[tuple[int, int, int]], span: Span, elements: int, width: int, order: int
    ) -> PlaneWords:
        """The planes of a span side by side."""
        low, high = span
        joined = self.memory.empty((high - low) * width)
        starts = [at + plane * elements + low - first for plane, (at, first, _) in enumerate(ranges)]
        table = SegmentTable.flat(
            dst_offset=np.arange(width) * (high - low), src_offset=np.array(starts, np.int64), nbytes=high - low
        )
        copy_segments(bind_moves(table, dst=[joined], src=[self.raw]))
        return PlaneWords(offset=low * width, planes=Planes(data=joined, element_bytes=width, order=order))

    def _decode(self, payload: Bytes, layout: Gf01Layout, span: Span, where: Where) -> tuple[int, int, int]:
        """`(where in `raw`, first raw byte, one past the last)` of the frames that hold a span of raw bytes."""
        first, stop = span[0] // layout.frame_bytes, -(-span[1] // layout.frame_bytes)
        start = self.raw_bytes
        for frame in range(first, stop):
            stored = payload[int(layout.frame_offsets[frame]) : int(layout.frame_offsets[frame + 1])]
            nbytes = layout.decoded_bytes(frame)
            self.frames.append(
                StoredFrame(stored=memoryview(stored), nbytes=nbytes, offset=self.raw_bytes, where=where)
            )
            self.raw_bytes += -(-nbytes // 16) * 16
        return start, first * layout.frame_bytes, min(stop * layout.frame_bytes, layout.raw_bytes)


def _held(
    positions: npt.NDArray[np.uint32], first: int, rows: Rows, word_bytes: int, tensor_bytes: int
) -> slice | npt.NDArray[np.bool_] | None:
    """Which of a window's positions segments hold: all (None), a run of them, or a mask."""
    if int((rows["rows"] * rows["row_bytes"]).sum()) >= tensor_bytes:
        return None
    start, stop = span_of(rows)
    low, high = (
        int(np.searchsorted(positions, max(at - first, 0))) for at in (start // word_bytes, -(-stop // word_bytes))
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
