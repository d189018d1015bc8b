"""The would-be state of a tensor, made window by window in scratch: base bytes, then each delta of a chain in order.

Readers digest what comes out before anything is written; publishers use the same loop to see what readers will get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gpusync.codec.decoder import DeltaDecoder
from gpusync.codec.payload import U8, Payload
from gpusync.codec.windows import WINDOW_BYTES
from gpusync.errors import NOWHERE, ChainError, LayoutError, Where


def would_be(
    base: Payload | None,
    decoders: Sequence[DeltaDecoder],
    *,
    nbytes: int,
    window_bytes: int = WINDOW_BYTES,
    scratch: U8 | None = None,
    where: Where = NOWHERE,
) -> Iterator[tuple[int, U8, U8]]:
    """Yields (offset, old, new) for ascending windows of a tensor of `nbytes` bytes; calls every `finish` at the end.

    `old` holds the base's bytes, `new` what `decoders`, applied one after the other, make of them; both are valid until
    the next step only, and writable (they are copies). Without a base `old` is empty. No decoder: `new` equals `old`.
    A tensor of no bytes yields nothing, its payloads are checked all the same. Windows are shorter than `window_bytes`,
    or as long as one element, where a decoder takes whole elements only.

    `scratch`: u8, at least `2 * min(window_bytes, nbytes)` long, to spare the allocation; one thread's own.
    Raises, before the first window, `LayoutError` if the base has another size, `ChainError` if there is none and the
    first delta needs one.
    """
    if base is None and (not decoders or decoders[0].needs_base):
        raise ChainError(
            "nothing to apply the first delta to", where=where, expected=f"{nbytes} bytes", found="no base"
        )
    if base is not None and base.nbytes != nbytes:
        raise LayoutError("base tensor has another size", where=where, expected=nbytes, found=base.nbytes)
    if window_bytes < 1:
        raise LayoutError("window of no bytes", where=where, expected="at least 1", found=window_bytes)
    unit_bytes = max((decoder.unit_bytes for decoder in decoders), default=1)
    window_bytes = max(window_bytes - window_bytes % unit_bytes, unit_bytes)
    return _windows(base, decoders, nbytes, _two_windows(scratch, min(window_bytes, nbytes), where))


def _windows(
    base: Payload | None, decoders: Sequence[DeltaDecoder], nbytes: int, scratch: tuple[U8, U8]
) -> Iterator[tuple[int, U8, U8]]:
    olds, news = scratch
    for offset in range(0, nbytes, len(news) or 1):
        new = news[: nbytes - offset]
        old = olds[: 0 if base is None else len(new)]
        if base is not None:
            base.read_into(offset, memoryview(old))
            new[:] = old
        for decoder in decoders:
            decoder.apply(new, offset)
        yield offset, old, new
    for decoder in decoders:
        decoder.finish()


def _two_windows(scratch: U8 | None, window_bytes: int, where: Where) -> tuple[U8, U8]:
    if scratch is None:
        scratch = np.empty(2 * window_bytes, np.uint8)
    if len(scratch) < 2 * window_bytes:
        raise LayoutError("scratch is too small", where=where, expected=2 * window_bytes, found=len(scratch))
    return scratch[:window_bytes], scratch[window_bytes : 2 * window_bytes]
