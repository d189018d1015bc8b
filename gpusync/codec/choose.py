"""Chooses the GF01 form of one tensor: the smallest, without encoding what plainly is not.

Forms are tried in the order of what a sample promises, until the best so far is clearly below the promise of the next.
"""

from __future__ import annotations

import numpy as np

from gpusync.codec.gf01_encode import FRAME_BYTES, encode_gf01
from gpusync.codec.gf01_layout import FULL, FULL_PLANES, TRANSFORM_NAMES, XOR
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import paired_windows, total_bytes
from gpusync.errors import NOWHERE, Where

UNCHANGED = "unchanged"

_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16
# A form is encoded too if the best so far is not below this share of what the sample says of it.
_CLEAR = 0.9
# zstd-1 needs up to about two bytes for a changed byte among unchanged ones, whatever the sample has seen of them.
_XOR_BYTES_PER_CHANGE = 2.0
_XOR_FLOOR = 0.001


def choose_gf01(
    old: U8 | Payload | None,
    new: U8 | Payload,
    *,
    element_bytes: int,
    float_order: bool,
    frame_bytes: int = FRAME_BYTES,
    level: int = 1,
    where: Where = NOWHERE,
) -> tuple[bytes | None, str]:
    """(payload, name of its transform); (None, "unchanged") if `old` is given and equal to `new`.

    Both are read several times: whole arrays or sources, no iterators. Without `old` the payload needs no base.
    """
    nbytes = total_bytes(new, nbytes=None, where=where)
    promised = _promised_ratios(old, new, nbytes, element_bytes, level, where)
    best: bytes | None = None
    name = UNCHANGED
    for transform, ratio in sorted(promised.items(), key=lambda item: item[1]):
        if best is not None and len(best) <= _CLEAR * ratio * nbytes:
            break
        payload = encode_gf01(
            old if transform == XOR else None,
            new,
            transform=transform,
            element_bytes=element_bytes,
            float_order=float_order,
            frame_bytes=frame_bytes,
            level=level,
            where=where,
        )
        if payload is not None and (best is None or len(payload) < len(best)):
            best, name = payload, TRANSFORM_NAMES[transform]
    return best, name


def _promised_ratios(
    old: U8 | Payload | None, new: U8 | Payload, nbytes: int, element_bytes: int, level: int, where: Where
) -> dict[int, float]:
    """Transform -> payload bytes per tensor byte, from a sample and, for xor, from the count of changed bytes.

    Nothing for an unchanged tensor. The count is there because changes cluster (rows of an embedding) and a sample can
    hit, or miss, all of them.
    """
    changed = _changed_bytes(old, new, nbytes, where)
    if changed == 0 and old is not None:
        return {}
    after = _sample(new, nbytes)
    transforms = [FULL] if element_bytes == 1 else [FULL_PLANES, FULL]
    sizes = {t: _sampled_ratio(None, after, t, element_bytes, level) for t in transforms}
    if old is not None:
        sampled = _sampled_ratio(_sample(old, nbytes), after, XOR, element_bytes, level)
        sizes[XOR] = min(sampled, _XOR_FLOOR + _XOR_BYTES_PER_CHANGE * changed / nbytes)
    return sizes


def _changed_bytes(old: U8 | Payload | None, new: U8 | Payload, nbytes: int, where: Where) -> int:
    if old is None:
        return 0
    windows = paired_windows(old, new, nbytes=nbytes, where=where)
    return sum(int(np.count_nonzero(before != after)) for _, before, after in windows)


def _sampled_ratio(old: U8 | None, new: U8, transform: int, element_bytes: int, level: int) -> float:
    payload = encode_gf01(
        old,
        new,
        transform=transform,
        element_bytes=element_bytes,
        float_order=False,
        frame_bytes=FRAME_BYTES,
        level=level,
    )
    return 0.0 if payload is None else len(payload) / max(1, len(new))


def _sample(data: U8 | Payload, nbytes: int) -> U8:
    """Evenly spaced stretches of whole elements (offsets are multiples of 8), or all of a small tensor."""
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        starts, length = [0], nbytes
    else:
        starts = [(nbytes - _SAMPLE_BYTES) * i // (_SAMPLES - 1) & ~7 for i in range(_SAMPLES)]
        length = _SAMPLE_BYTES
    sample = np.empty(len(starts) * length, np.uint8)
    for at, start in enumerate(starts):
        part = sample[at * length : (at + 1) * length]
        if isinstance(data, np.ndarray):
            part[:] = data.reshape(-1)[start : start + length]
        else:
            data.read_into(start, as_bytes(part))
    return sample
