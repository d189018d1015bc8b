"""Compact form: what changed between two states of some bytes, as ascending element positions and the new elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.uint32]

ELEMENT_TYPES: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
MAX_WINDOW_ELEMENTS = 2**31


def changed_positions(old: Bytes, new: Bytes, *, element_bytes: int) -> Positions:
    """Ascending positions (u32, in elements) at which two equally long u8 windows differ.

    The windows hold whole elements of 1, 2, 4 or 8 bytes, fewer than 2**31 of them. Eight bytes are compared at a time
    and only the words that differ are looked at again: at the densities of RL updates this is several times faster
    than comparing element by element.
    """
    whole = old.size & ~7
    per_word = 8 // element_bytes
    words = np.flatnonzero(old[:whole].view("<u8") != new[:whole].view("<u8"))
    kind = ELEMENT_TYPES[element_bytes]
    if per_word == 1:
        head = words
    else:
        before = old[:whole].view(kind).reshape(-1, per_word)[words]
        after = new[:whole].view(kind).reshape(-1, per_word)[words]
        row, column = np.nonzero(before != after)
        head = words[row] * per_word + column
    tail = np.flatnonzero(old[whole:].view(kind) != new[whole:].view(kind)) + whole // element_bytes
    return np.concatenate([head, tail]).astype("<u4")


def elements(window: Bytes, *, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """The window's bytes as unsigned little-endian elements; shares memory."""
    view: npt.NDArray[np.unsignedinteger] = window.view(ELEMENT_TYPES[element_bytes])
    return view
