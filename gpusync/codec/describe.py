"""What a payload says of itself, from its first bytes, without decoding it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from gpusync.codec.decoder import PAYLOAD_FORMS
from gpusync.codec.frame_header import MAX_FRAME_HEADER_BYTES, frame_info
from gpusync.codec.gf01_layout import GF01_MAGIC, HEADER_BYTES, TRANSFORM_NAMES
from gpusync.codec.gs01_packed import GP01_MAGIC, packed_claims
from gpusync.codec.payload import Payload, read_head
from gpusync.errors import NOWHERE, PayloadError, Where
from gpusync_kernels.gs01 import HEAD, head_bytes, parse_blob
from gpusync_kernels.gs01 import MAGIC as GS01_MAGIC

# overwrite: count u4, then a position u4 and a value u1 for each
COUNT_BYTES, ENTRY_BYTES = 4, 5
# Of a GS01 payload with more descriptors than this nothing but the form is told.
MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSummary:
    """`form` names the payload's form. `tensor_bytes` is the size of the tensor it belongs to, `bytes_changed` how many
    bytes it writes, whole elements where it changes elements; None where its head does not tell. Claims of the payload,
    not findings."""

    form: str
    tensor_bytes: int | None = None
    bytes_changed: int | None = None


def summarise_payload(payload: Payload, *, encoding: str, where: Where = NOWHERE) -> PayloadSummary:
    """Raises PayloadError for a head that is no payload of `encoding`."""
    head = read_head(payload, max(MAX_FRAME_HEADER_BYTES, HEADER_BYTES))
    if encoding == "gpusync" and head[:4] == GS01_MAGIC:
        return _summarise_gs01(payload, where)
    if encoding == "gpusync" and head[:4] == GP01_MAGIC:
        tensor_bytes, bytes_changed = packed_claims(payload, where=where)
        return PayloadSummary(form=GP01_MAGIC.decode(), tensor_bytes=tensor_bytes, bytes_changed=bytes_changed)
    if encoding == "gpusync":
        return _summarise_gf01(head, where)
    size = frame_info(head, where=where).content_size
    if encoding == "overwrite":
        changed = None if size is None else max(0, size - COUNT_BYTES) // ENTRY_BYTES
        return PayloadSummary(form="overwrite", bytes_changed=changed)
    return PayloadSummary(form=encoding, tensor_bytes=size)


def _summarise_gs01(payload: Payload, where: Where) -> PayloadSummary:
    start = read_head(payload, HEAD.size)
    if len(start) < HEAD.size or head_bytes(start) > min(payload.nbytes, MAX_HEAD_BYTES):
        return PayloadSummary(form=GS01_MAGIC.decode())
    try:
        blob = parse_blob(read_head(payload, head_bytes(start)), payload.nbytes)
    except ValueError as error:
        raise PayloadError(str(error), where=where) from error
    return PayloadSummary(
        form=GS01_MAGIC.decode(),
        tensor_bytes=blob.elements * blob.element_bytes,
        bytes_changed=int(blob.streams["count"].sum(dtype=np.int64)) * blob.element_bytes,
    )


def _summarise_gf01(head: bytes, where: Where) -> PayloadSummary:
    if head[:4] != GF01_MAGIC or len(head) < HEADER_BYTES or head[4] >= len(TRANSFORM_NAMES):
        raise PayloadError(
            "payload is none of gpusync's forms", where=where, expected=PAYLOAD_FORMS, found=head[:4].hex()
        )
    (raw_bytes,) = struct.unpack_from("<Q", head, 8)
    return PayloadSummary(form=f"GF01 {TRANSFORM_NAMES[head[4]]}", tensor_bytes=raw_bytes)
