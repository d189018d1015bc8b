"""What a codec reads: anything with a length that can fill a buffer from an offset.

The readers of files are not known here; a range of a file and a plain buffer look the same.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


@runtime_checkable
class Payload(Protocol):
    """Stored bytes. `read_into` fills the whole of a writable byte buffer or raises."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, buffer: memoryview, /) -> None: ...


@runtime_checkable
class HeldPayload(Payload, Protocol):
    """One whose bytes are in memory."""

    @property
    def data(self) -> memoryview: ...


class MemoryPayload:
    """A `HeldPayload` over bytes in memory; keeps a view, not a copy."""

    def __init__(self, data: bytes | bytearray | memoryview | U8) -> None:
        self.data = memoryview(data).cast("B") if len(data) else memoryview(b"")

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview, /) -> None:
        """Raises `ValueError` if the range leaves the data."""
        if offset < 0 or offset + len(buffer) > len(self.data):
            raise ValueError(f"bytes {offset}..{offset + len(buffer)} of {len(self.data)}")
        buffer[:] = self.data[offset : offset + len(buffer)]


def read_head(payload: Payload, nbytes: int) -> bytes:
    """The first `nbytes` bytes, or all of them if there are fewer."""
    head = bytearray(min(nbytes, payload.nbytes))
    payload.read_into(0, memoryview(head))
    return bytes(head)


def as_bytes(array: U8) -> memoryview:
    """A byte view of a contiguous array, of length 0 too (`memoryview.cast` refuses shapes with a zero)."""
    return memoryview(array) if array.size else memoryview(bytearray())
