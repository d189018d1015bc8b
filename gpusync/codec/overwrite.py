"""Slime's `overwrite`: the changed bytes and where they stand, as one zstd frame.

`count u4 | positions u4 × count | values u1 × count`, little-endian; positions are byte offsets in the tensor, each at
most once, ascending as every known writer has them, but that is no rule. A tensor of 4 GiB or more has positions that
do not fit: the encoder refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import zstandard

from gpusync.codec.frames import read_frame_info
from gpusync.codec.overwrite_runs import U32, Run, open_runs
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import WINDOW_BYTES, WindowOrder, Windows, paired_windows, pieces, total_bytes
from gpusync.errors import NOWHERE, PayloadError, UnsupportedFormatError, Where

MAX_TENSOR_BYTES = (1 << 32) - 1
_POSITION_LIMIT = 1 << 32


class OverwriteDecoder:
    """Writes the listed values into windows; bytes that are not listed stay. Memory: see `open_runs`."""

    needs_base = True
    unit_bytes = 1

    def __init__(self, payload: Payload, *, nbytes: int, where: Where = NOWHERE) -> None:
        count = _declared_count(payload, nbytes, where)
        self._order = WindowOrder(nbytes=nbytes, where=where)
        self._runs = open_runs(payload, count=count, nbytes=nbytes, where=where)
        self._positions: U32 = np.empty(0, np.uint32)
        self._values: U8 = np.empty(0, np.uint8)

    def apply(self, window: U8, offset: int) -> None:
        self._order.advance(window, offset)
        for piece, start in pieces(window, offset):
            self._apply_piece(piece, start)

    def runs(self) -> Iterator[Run]:
        """The changes themselves, (positions, values), ascending; instead of `apply` and `finish`, to the end."""
        return self._runs

    def finish(self) -> None:
        self._order.finish()
        # Runs the checks behind the last run; a tensor without elements has had no window to run any.
        if len(self._positions) or next(self._runs, None) is not None:
            raise PayloadError("positions are left over behind the last window", where=self._order.where)

    def _apply_piece(self, piece: U8, start: int) -> None:
        stop = start + len(piece)
        while True:
            taken = _count_below(self._positions, stop)
            if taken:
                at = np.subtract(self._positions[:taken], start, dtype=np.intp)
                piece[at] = self._values[:taken]
                self._positions, self._values = self._positions[taken:], self._values[taken:]
            if len(self._positions):
                return
            run = next(self._runs, None)
            if run is None:
                return
            self._positions, self._values = run


def encode_overwrite(
    old: Windows,
    new: Windows,
    *,
    nbytes: int | None = None,
    level: int = 1,
    window_bytes: int = WINDOW_BYTES,
    where: Where = NOWHERE,
) -> bytes | None:
    """The payload that turns `old` into `new`, or None if they are equal.

    Takes what `encode_xor` takes. Holds 5 bytes for every changed one. Raises `UnsupportedFormatError` for a tensor of
    4 GiB or more, whose positions would wrap.
    """
    nbytes = total_bytes(new, nbytes=nbytes, where=where)
    if nbytes > MAX_TENSOR_BYTES:
        raise UnsupportedFormatError(
            "tensor is too large for encoding overwrite", where=where, expected=f"at most {MAX_TENSOR_BYTES} bytes",
            found=nbytes,
        )  # fmt: skip
    positions: list[U32] = []
    values: list[U8] = []
    for offset, before, after in paired_windows(old, new, nbytes=nbytes, window_bytes=window_bytes, where=where):
        changed = np.flatnonzero(before != after)
        if len(changed):
            positions.append((changed + offset).astype(np.uint32))
            values.append(after[changed])
    count = sum(len(part) for part in values)
    if count == 0:
        return None
    compressor = zstandard.ZstdCompressor(level=level).compressobj(size=4 + 5 * count)
    chunks = [compressor.compress(count.to_bytes(4, "little"))]
    chunks.extend(compressor.compress(as_bytes(part.view(np.uint8))) for part in positions)
    chunks.extend(compressor.compress(as_bytes(part)) for part in values)
    chunks.append(compressor.flush())
    return b"".join(chunks)


def _declared_count(payload: Payload, nbytes: int, where: Where) -> int:
    """The count that the frame's declared size implies; all of it is refused before anything is decoded."""
    info = read_frame_info(payload, where=where)
    if info.content_size is None:
        raise PayloadError("zstd frame declares no content size", where=where, expected="4 + 5 × count", found="none")
    most = min(nbytes, _POSITION_LIMIT - 1)
    count, rest = divmod(info.content_size - 4, 5)
    if rest or not 0 <= count <= most:
        raise PayloadError(
            "overwrite payload declares an impossible size", where=where,
            expected=f"4 + 5 × count, count at most {most}", found=info.content_size,
        )  # fmt: skip
    return count


def _count_below(positions: U32, stop: int) -> int:
    if not len(positions):
        return 0
    if int(positions[-1]) < stop:
        return len(positions)
    return int(np.searchsorted(positions, np.uint32(stop)))
