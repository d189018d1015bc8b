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
LINE_BYTES = 64


def changed_positions(old: Bytes | None, new: Bytes, *, element_bytes: int) -> Positions:
    """Ascending positions (u32, in elements) at which two equally long u8 windows differ; without `old`, at which `new`
    is not zero.

    The windows hold whole elements of 1, 2, 4 or 8 bytes, fewer than 2**31 of them. 64 bytes are looked at together and
    only those that differ again: at the densities of RL updates most of the work is a plain exclusive-or.
    """
    kind, per_line = ELEMENT_TYPES[element_bytes], LINE_BYTES // element_bytes
    whole = new.size - new.size % LINE_BYTES
    differences = new[:whole].view("<u8")
    if old is not None:
        differences = old[:whole].view("<u8") ^ differences
    lines = np.flatnonzero((differences != 0).view("<u8"))  # eight flags, a line's words, as one
    found = np.flatnonzero(differences.view(kind).reshape(-1, per_line)[lines].reshape(-1) != 0)
    head = lines[found // per_line] * per_line + found % per_line
    rest = new[whole:].view(kind) if old is None else old[whole:].view(kind) ^ new[whole:].view(kind)
    tail = np.flatnonzero(rest) + whole // element_bytes
    return np.concatenate([head, tail]).astype("<u4")


def count_changed(old: Bytes, new: Bytes, *, element_bytes: int) -> int:
    """How many elements of two equally long windows differ."""
    return int(
        np.count_nonzero(elements(old, element_bytes=element_bytes) != elements(new, element_bytes=element_bytes))
    )


def elements(window: Bytes, *, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """The window's bytes as unsigned little-endian elements; shares memory."""
    view: npt.NDArray[np.unsignedinteger] = window.view(ELEMENT_TYPES[element_bytes])
    return view
