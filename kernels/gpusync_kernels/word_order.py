"""The order in which steps count words: M of the payload formats, and back. Pure numpy.

order 0: a word is a two's-complement integer. order 1: sign and magnitude, as floats are, so that -0 and +0 neighbour
each other. A step d takes a word w to M(M(w) + d), wrapping; M is its own inverse.

16 bits, order 1: M(0x0001) = 1, M(0x0000) = 0, M(0x8000) = -1, M(0x8001) = -2
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
# Per width: how far the sign is shifted down, and all bits below it.
_FLIPS = {size: (kind(8 * size - 1), kind(np.iinfo(kind).max)) for size, kind in SIGNED.items()}

Words = npt.NDArray[Any]


def to_order(words: Words, order: int) -> Words:
    """Unsigned words -> signed integers that steps are added to."""
    signed = words.view(SIGNED[words.itemsize])
    return _flip(signed) if order == 1 else signed


def from_order(signed: Words, order: int) -> Words:
    """The inverse of `to_order`."""
    return (_flip(signed) if order == 1 else signed).view(f"<u{signed.itemsize}")


def zigzag(steps: Words) -> Words:
    """Signed steps -> unsigned words, small where the steps are: 0 -1 1 -2 become 0 1 2 3."""
    one, top = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
    coded: Words = (steps << one) ^ (steps >> top)
    return coded.view(f"<u{steps.itemsize}")


def unzigzag(coded: Words) -> Words:
    """The inverse of `zigzag`."""
    one = coded.dtype.type(1)
    steps: Words = (coded >> one) ^ (~(coded & one) + one)
    return steps.view(SIGNED[coded.itemsize])


def _flip(signed: Words) -> Words:
    top, lower = _FLIPS[signed.itemsize]
    flipped: Words = signed >> top
    flipped &= lower
    flipped ^= signed
    return flipped
