"""Deltas as a host keeps them for its ranks: decoded once where a delta is one frame, as published where it is ours.

A step is what one delta does to its tensor, in a form that does not depend on the base. `xor` and `overwrite` are
decoded into windows of at most 16 MiB of the tensor; a window is sparse (positions and words) or, where that would not
be smaller, plain bytes. `gs01` and `gf01` are payloads as they were published (packed steps as the blob that they stand
for), which each rank decodes where it holds slices. `full` replaces bytes by those of another file. The compact file
has no header: a step says where its arrays lie, each at a multiple of 16 bytes. It is scratch: nothing of it survives
the process group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpusync.codec import DeltaDecoder, Gf01Decoder, Gs01Decoder, OverwriteDecoder, Payload, XorDecoder
from gpusync.codec.compact import Positions, changed_positions, elements
from gpusync.errors import LayoutError, UnsupportedFormatError

WINDOW_BYTES = 16 * 2**20
PIECE_BYTES = 2**20
COPY_BYTES = 4 * 2**20
ALIGN = 16

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
StepKind = Literal["xor", "overwrite", "full", "gs01", "gf01"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Bytes [offset, offset + nbytes) of a tensor. Sparse: `count` u32 positions, in words from the window's start, at
    byte `positions_at` of the file, and as many words at `words_at`. Plain (`count` is None): the bytes at `words_at`.
    """

    offset: int
    nbytes: int
    count: int | None
    positions_at: int
    words_at: int

    @property
    def is_sparse(self) -> bool:
        return self.count is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One delta of one tensor. `word_bytes` is the width of its words; windows without a change are left out.

    `payload`, of a `gs01` or `gf01`, is (where it begins, its length). `path`: the file of a `full`; None for all
    others, which lie in the compact file. `replaces`: what stood there before cannot be had back from the step.
    """

    kind: StepKind
    word_bytes: int
    windows: Sequence[Window] = ()
    payload: tuple[int, int] | None = None
    path: str | None = None
    replaces: bool = False

    @property
    def nbytes(self) -> int:
        """What a rank that needs all of it copies to its device."""
        if self.payload is not None:
            return self.payload[1]
        return sum(w.nbytes if w.count is None else w.count * (4 + self.word_bytes) for w in self.windows)


def full_step(*, path: Path, offset: int, nbytes: int) -> Step:
    """The step that makes a tensor of `nbytes` bytes what stands at `offset` of a file of this host."""
    windows = [
        Window(offset=at, nbytes=min(WINDOW_BYTES, nbytes - at), count=None, positions_at=0, words_at=offset + at)
        for at in range(0, nbytes, WINDOW_BYTES)
    ]
    return Step(kind="full", word_bytes=1, windows=tuple(windows), path=os.fspath(path), replaces=True)


class CompactWriter:
    """Writes steps into one file. Several threads may add steps at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._lock = threading.Lock()
        self._scratch = threading.local()

    @property
    def nbytes(self) -> int:
        return self._end

    def own(self, payload: Payload) -> Payload:
        """A payload of a file, copied here, where nobody else can change it any more."""
        return _Copied(self._fd, self._copy(payload), payload.nbytes)

    def add(self, decoder: DeltaDecoder, *, nbytes: int, element_bytes: int) -> Step:
        """The whole of one delta of a tensor of `nbytes` bytes. A payload that is kept is in memory, or `own`. Raises
        what the decoder raises; the file then holds bytes that nobody names."""
        if isinstance(decoder, OverwriteDecoder):
            listed = [self._sparse(0, nbytes, positions, values) for positions, values in decoder.runs()]
            return Step(kind="overwrite", word_bytes=1, windows=tuple(listed))
        if isinstance(decoder, XorDecoder):
            return self._add_xor(decoder, nbytes=nbytes, element_bytes=element_bytes)
        if isinstance(decoder, Gf01Decoder):
            replaces = not decoder.needs_base
            return Step(kind="gf01", word_bytes=element_bytes, payload=self._keep(decoder.payload), replaces=replaces)
        if isinstance(decoder, Gs01Decoder):
            decoder.check()
            return Step(kind="gs01", word_bytes=element_bytes, payload=self._keep(decoder.payload))
        raise UnsupportedFormatError("a delta of an unknown form", found=type(decoder).__name__)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add_xor(self, decoder: XorDecoder, *, nbytes: int, element_bytes: int) -> Step:
        windows = []
        for offset in range(0, nbytes, WINDOW_BYTES):
            window = self._xor_window(decoder, offset, min(WINDOW_BYTES, nbytes - offset), element_bytes)
            if window is not None:
                windows.append(window)
        decoder.finish()
        return Step(kind="xor", word_bytes=element_bytes, windows=tuple(windows))

    def _xor_window(self, decoder: XorDecoder, offset: int, nbytes: int, width: int) -> Window | None:
        made, found = self._buffer(nbytes), []
        for start in range(0, nbytes, PIECE_BYTES):  # looked at while it is still in a core's cache
            piece = made[start : start + PIECE_BYTES]
            decoder.read(piece, offset + start)
            found.append(changed_positions(None, piece, element_bytes=width) + np.uint32(start // width))
        positions = np.concatenate(found)
        if not len(positions):
            return None
        if len(positions) * (4 + width) < nbytes:
            return self._sparse(offset, nbytes, positions, elements(made, element_bytes=width)[positions])
        return Window(offset=offset, nbytes=nbytes, count=None, positions_at=0, words_at=self._append(made))

    def _buffer(self, nbytes: int) -> Bytes:
        """This thread's window, made once: fresh memory costs as much as decoding into it."""
        if not hasattr(self._scratch, "window"):
            self._scratch.window = np.empty(WINDOW_BYTES, np.uint8)
        window: Bytes = self._scratch.window[:nbytes]
        return window

    def _sparse(self, offset: int, nbytes: int, positions: Positions, words: Words) -> Window:
        return Window(
            offset=offset,
            nbytes=nbytes,
            count=len(positions),
            positions_at=self._append(positions.view(np.uint8)),
            words_at=self._append(words.view(np.uint8)),
        )

    def _keep(self, payload: Payload) -> tuple[int, int]:
        """`(where it begins in the file, its length)`."""
        return payload.offset if isinstance(payload, _Copied) else self._copy(payload), payload.nbytes

    def _copy(self, payload: Payload) -> int:
        at = self._reserve(payload.nbytes)
        part = np.empty(min(COPY_BYTES, payload.nbytes), np.uint8)
        for offset in range(0, payload.nbytes, COPY_BYTES):
            piece = part[: min(COPY_BYTES, payload.nbytes - offset)]
            payload.read_into(offset, memoryview(piece))
            self._write(at + offset, piece)
        return at

    def _append(self, data: Bytes) -> int:
        at = self._reserve(data.size)
        self._write(at, data)
        return at

    def _reserve(self, nbytes: int) -> int:
        with self._lock:
            at = self._end
            self._end = at + -(-nbytes // ALIGN) * ALIGN
        return at

    def _write(self, at: int, data: Bytes) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], at + done)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A payload in the compact file."""

    fd: int
    offset: int
    nbytes: int

    def read_into(self, offset: int, buffer: memoryview, /) -> None:
        done = 0
        while done < len(buffer):
            done += os.preadv(self.fd, [buffer[done:]], self.offset + offset + done)


@dataclass(slots=True)
class StepFiles:
    """The files that steps name, as a rank of the host reads them. The compact file, this host's own scratch, is
    mapped; others are read."""

    compact: Path
    _mapped: Bytes | None = None
    _opened: dict[str, int] = field(default_factory=dict)

    def words(self, step: Step, window: Window) -> Words:
        """The words of a sparse window, or the bytes of a plain one. Shares memory where the file is mapped."""
        if window.count is None:
            return self.read(step, window.words_at, window.nbytes)
        nbytes = window.count * step.word_bytes
        return elements(self._map()[window.words_at : window.words_at + nbytes], element_bytes=step.word_bytes)

    def positions(self, window: Window) -> npt.NDArray[np.uint32]:
        """The positions of a sparse window. Shares memory."""
        found: npt.NDArray[np.uint32] = self._map()[window.positions_at :][: 4 * (window.count or 0)].view("<u4")
        return found

    def payload(self, step: Step) -> Bytes:
        """The payload of a step as it was published. Shares memory."""
        if step.payload is None:
            raise LayoutError("a step has no payload", found=step.kind)
        return self.read(step, *step.payload)

    def read(self, step: Step, at: int, nbytes: int) -> Bytes:
        """`nbytes` bytes from `at` of the file that a step names."""
        if step.path is None:
            return self._map()[at : at + nbytes]
        data = np.empty(nbytes, np.uint8)
        view, done = memoryview(data), 0
        while done < nbytes:
            got = os.preadv(self._open(step.path), [view[done:]], at + done)
            if not got:
                raise LayoutError("a file of this host has become shorter", path=step.path, expected=at + nbytes)
            done += got
        return data

    def close(self) -> None:
        """Close the files; what is mapped stays as long as somebody uses it."""
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()
        self._mapped = None

    def _map(self) -> Bytes:
        if self._mapped is None:
            nbytes = self.compact.stat().st_size
            self._mapped = np.memmap(self.compact, np.uint8, "r") if nbytes else np.empty(0, np.uint8)
        return self._mapped

    def _open(self, path: str) -> int:
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._opened[path]
