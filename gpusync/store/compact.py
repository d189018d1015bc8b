"""Deltas decoded once per host, in compact form, in a file that the host's ranks map.

What a step does to its tensor does not depend on the base: `xor` and `overwrite` words stand at positions, `full`
bytes replace. A step is cut into windows of at most 16 MiB of the tensor; a window is sparse (positions and words) or,
where that would not be smaller, plain bytes. The file has no header: a window says where its arrays lie, each at a
multiple of 16 bytes. It is scratch: nothing of it survives the process group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpusync.codec import DeltaDecoder, Gf01Decoder, OverwriteDecoder, XorDecoder
from gpusync.codec.compact import Positions, changed_positions, count_changed, elements
from gpusync.errors import LayoutError

WINDOW_BYTES = 16 * 2**20
ALIGN = 16

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
StepKind = Literal["xor", "overwrite", "full"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One delta of one tensor. `word_bytes` is the width of its words; windows without a change are left out."""

    kind: StepKind
    word_bytes: int
    windows: Sequence[Window]

    @property
    def nbytes(self) -> int:
        """What a rank that needs all of it copies to its device."""
        return sum(w.nbytes if w.count is None else w.count * (4 + self.word_bytes) for w in self.windows)


class CompactWriter:
    """Decodes steps into one file. Several threads may add steps at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._end

    def add(self, decoder: DeltaDecoder, *, nbytes: int, element_bytes: int) -> Step:
        """The whole of one delta of a tensor of `nbytes` bytes. Raises what the decoder raises; the file then holds
        bytes that nobody names."""
        if isinstance(decoder, OverwriteDecoder):
            listed = [self._sparse(0, nbytes, positions, values) for positions, values in decoder.runs()]
            return Step(kind="overwrite", word_bytes=1, windows=tuple(listed))
        kind: StepKind = "xor" if is_xor(decoder) else "full"
        width = element_bytes
        windows = []
        for offset in range(0, nbytes, WINDOW_BYTES):
            window = self._window(decoder, kind, offset, min(WINDOW_BYTES, nbytes - offset), width)
            if window is not None:
                windows.append(window)
        decoder.finish()
        return Step(kind=kind, word_bytes=width, windows=tuple(windows))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _window(self, decoder: DeltaDecoder, kind: StepKind, offset: int, nbytes: int, width: int) -> Window | None:
        made = np.zeros(nbytes, np.uint8)
        decoder.apply(made, offset)  # the xor of nothing is the difference itself
        if kind == "xor":
            nothing = np.zeros(nbytes, np.uint8)
            count = count_changed(nothing, made, element_bytes=width)
            if count == 0:
                return None
            if count * (4 + width) < nbytes:
                positions = changed_positions(nothing, made, element_bytes=width)
                return self._sparse(offset, nbytes, positions, elements(made, element_bytes=width)[positions])
        return Window(offset=offset, nbytes=nbytes, count=None, positions_at=0, words_at=self._append(made))

    def _sparse(self, offset: int, nbytes: int, positions: Positions, words: Words) -> Window:
        return Window(
            offset=offset,
            nbytes=nbytes,
            count=len(positions),
            positions_at=self._append(positions.view(np.uint8)),
            words_at=self._append(words.view(np.uint8)),
        )

    def _append(self, data: Bytes) -> int:
        with self._lock:
            at = self._end
            self._end = at + -(-data.size // ALIGN) * ALIGN
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], at + done)
        return at


def is_xor(decoder: DeltaDecoder) -> bool:
    """True for a step that is the exclusive-or with bytes of its own, False for one that writes all bytes.

    StoreError for any other: it has no form that does without the base.
    """
    if isinstance(decoder, XorDecoder) or (isinstance(decoder, Gf01Decoder) and decoder.needs_base):
        return True
    if decoder.needs_base:
        raise LayoutError("a delta has no base-free form", found=type(decoder).__name__)
    return False


class CompactFile:
    """A compact file as a rank sees it: mapped, read only. It is this host's own scratch, never a stream's file."""

    def __init__(self, path: Path) -> None:
        self._bytes: Bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)

    def words(self, step: Step, window: Window) -> npt.NDArray[np.unsignedinteger]:
        """The words of a sparse window, or the bytes of a plain one. Shares memory."""
        if window.count is None:
            return self._bytes[window.words_at : window.words_at + window.nbytes]
        nbytes = window.count * step.word_bytes
        return elements(self._bytes[window.words_at : window.words_at + nbytes], element_bytes=step.word_bytes)

    def positions(self, window: Window) -> npt.NDArray[np.uint32]:
        """The positions of a sparse window. Shares memory."""
        found: npt.NDArray[np.uint32] = self._bytes[window.positions_at :][: 4 * (window.count or 0)].view("<u4")
        return found
