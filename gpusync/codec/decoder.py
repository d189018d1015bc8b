"""Opens a tensor's delta by the name of its encoding. What an opened delta promises is `DeltaDecoder`."""

from __future__ import annotations

from typing import Protocol

from gpusync.codec.gf01 import GF01_MAGIC, Gf01Decoder
from gpusync.codec.gs01 import GS01_MAGIC, Gs01Decoder
from gpusync.codec.gs01_packed import GP01_MAGIC, expand
from gpusync.codec.overwrite import OverwriteDecoder
from gpusync.codec.payload import U8, MemoryPayload, Payload, read_head
from gpusync.codec.windows import WINDOW_BYTES
from gpusync.codec.xor import XorDecoder
from gpusync.errors import NOWHERE, LayoutError, PayloadError, UnsupportedFormatError, Where

ENCODINGS = ("xor", "overwrite", "gpusync")
# A payload of our own that later readers will know.
_LATER_MAGICS = (b"GS02",)
PAYLOAD_FORMS = f"{GS01_MAGIC.decode()}, {GP01_MAGIC.decode()} or {GF01_MAGIC.decode()}"


class DeltaDecoder(Protocol):
    """One pass over one tensor. Memory is bounded by windows, never by the tensor.

    `apply` changes `window`, a writable 1-D u8 array that holds bytes [offset, offset + len) of the old tensor, into
    the new bytes. Windows come ascending, gapless, from 0, of any multiple of `unit_bytes`. It raises `PayloadError` at
    the first damage it meets, and may leave the window half changed then: windows are scratch, never the live tensor.
    `finish`, after the last window, checks that nothing is left over. Without `needs_base` the old bytes do not matter.
    """

    @property
    def needs_base(self) -> bool: ...

    @property
    def unit_bytes(self) -> int: ...

    def apply(self, window: U8, offset: int) -> None: ...

    def finish(self) -> None: ...


def open_delta(
    payload: Payload,
    *,
    encoding: str,
    nbytes: int,
    element_bytes: int,
    float_order: bool,
    where: Where = NOWHERE,
) -> DeltaDecoder:
    """Reads and checks the head of `payload`, the delta of a tensor of `nbytes` bytes.

    `element_bytes` and `float_order` are those of the tensor's dtype. `payload` must stay readable until `finish`.
    Raises `PayloadError` or, for an encoding or payload form that is not known, `UnsupportedFormatError`.
    """
    if encoding == "xor":
        return XorDecoder(payload, nbytes=nbytes, where=where)
    if encoding == "overwrite":
        return OverwriteDecoder(payload, nbytes=nbytes, where=where)
    if encoding == "gpusync":
        return _open_gpusync(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
    raise UnsupportedFormatError(
        "unknown delta encoding", where=where, expected=f"one of {', '.join(ENCODINGS)}", found=encoding
    )


def apply_whole(
    payload: Payload,
    target: U8,
    *,
    encoding: str,
    element_bytes: int,
    float_order: bool,
    window_bytes: int = WINDOW_BYTES,
    where: Where = NOWHERE,
) -> None:
    """Changes the whole tensor in `target` (1-D u8) in place. If it raises, `target` is neither old nor new."""
    if target.ndim != 1:
        raise LayoutError("target is not one-dimensional", where=where, expected=1, found=target.ndim)
    decoder = open_delta(
        payload, encoding=encoding, nbytes=len(target), element_bytes=element_bytes, float_order=float_order,
        where=where,
    )  # fmt: skip
    window_bytes = max(window_bytes - window_bytes % decoder.unit_bytes, decoder.unit_bytes)
    for offset in range(0, len(target), window_bytes):
        decoder.apply(target[offset : offset + window_bytes], offset)
    decoder.finish()


def _open_gpusync(payload: Payload, *, nbytes: int, element_bytes: int, where: Where) -> DeltaDecoder:
    magic = read_head(payload, 4)
    if magic == GF01_MAGIC:
        return Gf01Decoder(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
    if magic == GP01_MAGIC:
        expanded = expand(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
        return Gs01Decoder(MemoryPayload(expanded), nbytes=nbytes, element_bytes=element_bytes, where=where)
    if magic == GS01_MAGIC:
        return Gs01Decoder(payload, nbytes=nbytes, element_bytes=element_bytes, where=where)
    if magic in _LATER_MAGICS:
        raise UnsupportedFormatError(
            "payload form is not supported", where=where, expected=PAYLOAD_FORMS, found=magic.decode()
        )
    raise PayloadError(
        "payload is none of gpusync's forms", where=where, expected=PAYLOAD_FORMS, found=magic.hex() or "nothing"
    )
