"""What changed between two states of a tensor, small enough to keep for every tensor until a version is durable.

The comparison is in words of 8 bytes: far faster than in bytes, and a word is what is kept of a change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusync.codec import U8, Payload
from gpusync.codec.windows import paired_windows

_WORD = 8
# Above this share of changed words the whole new tensor takes less room than positions and words (16 bytes for 8).
_SPARSE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New bytes for a tensor: sparse (`positions` and `words`, and the whole `tail` of less than a word), or `whole`.

    Neither where nothing was to be kept. `changed_bytes` counts single bytes.
    """

    changed_bytes: int
    positions: npt.NDArray[np.int64] | None = None
    words: npt.NDArray[np.uint64] | None = None
    tail: U8 | None = None
    whole: U8 | None = None

    def apply_to(self, held: U8 | None) -> U8:
        """The new state. `held`, the old one, is changed in place where the change is sparse."""
        if self.whole is not None:
            return self.whole
        if held is None or self.positions is None or self.words is None or self.tail is None:
            raise ValueError("a change that was not kept, or nothing to apply it to")
        words = held.size // _WORD
        held[: words * _WORD].view(np.uint64)[self.positions] = self.words
        held[words * _WORD :] = self.tail
        return held


def find_change(old: U8 | Payload, new: U8 | Payload, *, keep: bool) -> Change:
    """Compare two states of one length, window by window. `keep`: so that it can be applied later.

    What is kept refers to neither of them.
    """
    nbytes = new.nbytes
    found = _Finder(keep=keep, most_words=int(nbytes // _WORD * _SPARSE_SHARE))
    for offset, before, after in paired_windows(old, new, nbytes=nbytes):
        found.compare(offset, before, after)
    return found.change(new)


def differs(old: U8 | Payload, new: U8 | Payload) -> bool:
    """Whether two states of one length differ; looks no further than to the first window that does."""
    return any(not np.array_equal(before, after) for _, before, after in paired_windows(old, new, nbytes=new.nbytes))


def read_whole(data: U8 | Payload) -> U8:
    """All bytes: the array itself, or a new one that was read."""
    if isinstance(data, np.ndarray):
        return data
    whole = np.empty(data.nbytes, np.uint8)
    if whole.size:
        data.read_into(0, memoryview(whole))
    return whole


class _Finder:
    def __init__(self, *, keep: bool, most_words: int) -> None:
        self._keep = keep
        self._most_words = most_words
        self._kept_words = 0
        self._positions: list[npt.NDArray[np.int64]] = []
        self._words: list[npt.NDArray[np.uint64]] = []
        self._tail: U8 = np.empty(0, np.uint8)
        self._changed_bytes = 0

    def compare(self, offset: int, before: U8, after: U8) -> None:
        """Windows come in order and, but for the last, are whole words."""
        whole = before.size - before.size % _WORD
        old_words, new_words = before[:whole].view(np.uint64), after[:whole].view(np.uint64)
        at = np.flatnonzero(old_words != new_words)
        if at.size:
            differing = new_words[at]
            self._changed_bytes += int(np.count_nonzero((old_words[at] ^ differing).view(np.uint8)))
            self._keep_words(at + offset // _WORD, differing)
        if whole < before.size:
            self._changed_bytes += int(np.count_nonzero(before[whole:] != after[whole:]))
            self._tail = after[whole:].copy()

    def change(self, new: U8 | Payload) -> Change:
        if not self._keep or not self._changed_bytes:
            return Change(changed_bytes=self._changed_bytes)
        if self._kept_words > self._most_words:
            return Change(changed_bytes=self._changed_bytes, whole=np.array(read_whole(new)))
        return Change(
            changed_bytes=self._changed_bytes,
            positions=np.concatenate([np.empty(0, np.int64), *self._positions]),
            words=np.concatenate([np.empty(0, np.uint64), *self._words]),
            tail=self._tail,
        )

    def _keep_words(self, positions: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]) -> None:
        self._kept_words += positions.size
        if self._keep and self._kept_words <= self._most_words:
            self._positions.append(positions)
            self._words.append(words)
        else:
            self._positions.clear()
            self._words.clear()
