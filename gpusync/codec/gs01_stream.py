"""One stream of a GS01 blob, decoded front to back in bounded chunks, every bit of it checked on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.errors import PayloadError, Where
from gpusync_kernels.gs01 import LITERAL, Blob
from gpusync_kernels.host import host_ops
from gpusync_kernels.host_numpy import BLOCK_BITS, step_of

# Chunks of one part's streams together stay in a core's caches.
_CHUNK_BLOCKS = 64
_CHECK_BLOCKS = 1024

Ints = npt.NDArray[np.int64]

_NO_POSITIONS: Ints = np.empty(0, np.int64)
_NO_VALUES: npt.NDArray[Any] = np.empty(0, np.uint32)
_NEVER = 1 << 63


class StreamReader:
    """The changes of stream `number`: ascending elements of the tensor, each with a signed step or a new word.

    Raises `PayloadError` at the first bit that the layout does not allow. Holds one chunk.
    """

    def __init__(self, payload: Payload, blob: Blob, number: int, *, where: Where) -> None:
        head = blob.streams[number]
        self.is_literal = bool(head["kind"] == LITERAL)
        self._magnitude = 1 << int(head["g"])
        self.part = int(head["part"])
        self.base = self.part << blob.part_log2
        self.span = min(blob.elements - self.base, 1 << blob.part_log2)
        self._count, self._bits, self._k, self._v = (int(head[name]) for name in ("count", "nbits", "k", "v"))
        self._literals_at, self._index_at, self._unary_at, self._fields_at, self._end = blob.offsets[number].tolist()
        self._element_bytes = blob.element_bytes
        self._payload, self._number, self._where = payload, number, where
        self._blocks = -(-self._bits // BLOCK_BITS)
        self._block, self._position, self._rank = 0, 0, 0
        self._positions: Ints = _NO_POSITIONS
        self._values: npt.NDArray[Any] = _NO_VALUES
        self._taken, self._next, self._last = 0, self.base, -1  # nothing is decoded before it is asked for

    def take(self, stop: int) -> list[tuple[Ints, npt.NDArray[Any]]]:
        """`(positions, steps)` of the changes below element `stop` that were not taken yet; words of a literal."""
        taken = []
        while self._next < stop:
            positions, values, first = self._positions, self._values, self._taken
            if self._last < stop:
                if len(positions):
                    taken.append((positions[first:], values[first:]))
                self._decode()
            else:
                self._taken = int(positions.searchsorted(stop))
                taken.append((positions[first : self._taken], values[first : self._taken]))
                self._next = int(positions[self._taken])
        return taken

    def check(self, marks: U8) -> None:
        """All of the stream, instead of `take`. `marks` has a bit for each element of the part, set where another
        stream changes it."""
        while self._block < self._blocks:
            positions, _ = self._decode_chunk(_CHECK_BLOCKS)
            if host_ops().set_marks(marks, positions):
                raise PayloadError("GS01 streams change an element twice", where=self._where)

    def _decode(self) -> None:
        """The next chunk that has a change; none are left behind the last."""
        self._positions, self._values, self._taken = _NO_POSITIONS, _NO_VALUES, 0
        self._next = self._last = _NEVER
        while not len(self._positions) and self._block < self._blocks:
            rank = self._rank
            positions, values = self._decode_chunk(_CHUNK_BLOCKS)
            self._values = self._read_literals(rank, len(positions)) if self.is_literal else self._steps(values)
            self._positions = positions + self.base
        if len(self._positions):
            self._next, self._last = int(self._positions[0]), int(self._positions[-1])

    def _decode_chunk(self, blocks: int) -> tuple[Ints, npt.NDArray[np.uint32]]:
        """Positions in the part, below its span, and values of the next blocks' changes."""
        first, stop = self._block, min(self._block + blocks, self._blocks)
        bits = min(self._bits, stop * BLOCK_BITS) - first * BLOCK_BITS
        unary = self._read(self._unary_at + first * BLOCK_BITS // 8, -(-bits // 32) * 4)
        ones = int(np.bitwise_count(unary.view("<u4")).sum())
        is_last = stop == self._blocks
        if self._rank + ones > self._count or (is_last and self._rank + ones != self._count):
            raise self._wrong("number of ones", self._count, f"{self._rank + ones} so far")
        if is_last and int(unary.view("<u4")[-1]) >> (self._bits - 1) % 32 != 1:
            raise self._wrong("last unary bit", "a one, and zeros behind it")
        width = self._k + self._v
        fields = self._read_fields(width, ones)
        positions, values, pairs = host_ops().decode_bits(
            unary, bits, fields, first=self._rank % 32, most=ones, k=self._k, v=self._v, position=self._position
        )
        self._check_index(first, stop, pairs)
        if ones and int(positions[-1]) >= self.span:
            raise self._wrong("position", f"below {self.span}", int(positions[-1]))
        if is_last:
            self._check_end(width)
        self._block, self._position, self._rank = stop, int(pairs[-1, 0]), self._rank + ones
        return positions, values

    def _check_index(self, first: int, stop: int, pairs: Ints) -> None:
        """Its pairs must be what the bits before them add up to, or decoding by blocks would differ."""
        index = self._read(self._index_at + 8 * first, 8 * (stop - first)).view("<u4").reshape(-1, 2)
        found = pairs[:-1] + np.array([0, self._rank])
        if not np.array_equal(index, found):
            block = int(np.argmax((index != found).any(axis=1)))
            raise self._wrong(f"index pair {first + block}", found[block].tolist(), index[block].tolist())

    def _read_fields(self, width: int, ones: int) -> U8:
        """The words with the fields of the next ones; the first of them stands at number rank modulo 32."""
        start = self._rank // 32 * width
        return self._read(self._fields_at + 4 * start, 4 * (-(-(self._rank + ones) * width // 32) - start))

    def _read_literals(self, rank: int, ones: int) -> npt.NDArray[Any]:
        size = self._element_bytes
        words = self._read(self._literals_at + rank * size, ones * size)
        return words.view(f"<u{size}")

    def _steps(self, values: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
        return step_of(values, self._magnitude, self._element_bytes)

    def _check_end(self, width: int) -> None:
        """Nothing but zeros behind the last field and the last literal word."""
        used = self._count * width
        last = self._fields_at + used // 8
        rest = self._read(last, self._end - last)
        if len(rest) and (int(rest[0]) >> used % 8 or rest[1:].any()):
            raise self._wrong("padding", "zeros")
        if self.is_literal:
            last = self._literals_at + self._count * self._element_bytes
            if self._read(last, self._index_at - last).any():
                raise self._wrong("padding", "zeros")

    def _read(self, offset: int, nbytes: int) -> U8:
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._payload.read_into(offset, as_bytes(data))
        return data

    def _wrong(self, field: str, expected: object, found: object = None) -> PayloadError:
        return PayloadError(
            f"GS01 stream {self._number} with a wrong {field}", where=self._where, expected=expected, found=found
        )
