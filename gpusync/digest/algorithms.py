"""Whole-tensor checksums by the names and in the text form that stand on the wire.

All of them are incremental and release the interpreter lock while they work, so that several tensors are hashed on
several threads. Digests of tensors that nobody holds whole live elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.errors import NOWHERE, UnsupportedFormatError, Where

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

PAYLOAD_ALGORITHM = "xxh3-64"
_PAYLOAD_DIGITS = 16
_LOWER_HEX = frozenset("0123456789abcdef")


class Digest(Protocol):
    """A running checksum. `update` takes any C-contiguous byte buffer; `hexdigest` may be asked at any time."""

    def update(self, buffer: Buffer, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    """zlib's adler32 as 8 digits; zlib itself knows no running object."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, buffer: Buffer, /) -> None:
        self._value = zlib.adler32(buffer, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_MAKERS: dict[str, tuple[int, Callable[[], Digest]]] = {
    "xxh3-128": (32, xxhash.xxh3_128),
    "blake3": (64, blake3.blake3),
    "adler32": (8, _Adler32),
}
ALGORITHMS = tuple(_MAKERS)


def new_digest(algorithm: str, *, where: Where = NOWHERE) -> Digest:
    """A fresh running checksum. Raises `UnsupportedFormatError` for a name that is not in `ALGORITHMS`."""
    return _maker(algorithm, where)[1]()


def digest_of(algorithm: str, buffer: Buffer, *, where: Where = NOWHERE) -> str:
    """The checksum of one buffer, as it is written on the wire: lowercase hex, 32, 64 or 8 digits."""
    digest = new_digest(algorithm, where=where)
    digest.update(buffer)
    return digest.hexdigest()


def is_checksum(algorithm: str, text: object, *, where: Where = NOWHERE) -> bool:
    """Whether `text` has the form that `hexdigest` gives; uppercase digits have not."""
    return _is_lower_hex(text, _maker(algorithm, where)[0])


def payload_checksum(buffer: Buffer) -> str:
    """xxh3-64 of a stored payload, 16 lowercase hex digits (an integrity check, not a defence against forgery)."""
    return xxhash.xxh3_64_hexdigest(buffer)


def is_payload_checksum(text: object) -> bool:
    """Whether `text` has the form that `payload_checksum` gives."""
    return _is_lower_hex(text, _PAYLOAD_DIGITS)


def _maker(algorithm: str, where: Where) -> tuple[int, Callable[[], Digest]]:
    found = _MAKERS.get(algorithm)
    if found is None:
        raise UnsupportedFormatError(
            "unknown checksum algorithm", where=where, expected=f"one of {', '.join(ALGORITHMS)}", found=algorithm
        )
    return found


def _is_lower_hex(text: object, digits: int) -> bool:
    return isinstance(text, str) and len(text) == digits and _LOWER_HEX.issuperset(text)
