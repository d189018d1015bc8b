"""Chooses the form of one tensor's payload: the smallest, without encoding what plainly is not.

A histogram of the steps says what GS01 or GP01 will take, a sample what a full form would; only what stays in
question is encoded.
"""

from __future__ import annotations

import numpy as np

from gpusync.codec.gf01_encode import FRAME_BYTES, encode_gf01
from gpusync.codec.gf01_layout import FULL, FULL_PLANES, STEP_PLANES, TRANSFORM_NAMES
from gpusync.codec.gs01_encode import Gs01Steps
from gpusync.codec.payload import U8, Payload, as_bytes
from gpusync.codec.windows import total_bytes
from gpusync.errors import NOWHERE, Where

UNCHANGED = "unchanged"

# Shares of the tensor: up to the first steps are taken without a look at step planes, up to the second a sample of them
# decides whether they are encoded too, above it they always are.
_SPARSE, _DENSE = 0.10, 0.25
# Below this share no full form is looked at, not even in a sample.
_NEGLIGIBLE = 0.03

_SAMPLE_BYTES = 8 << 10
_SAMPLES = 16
# A form is encoded too if the best so far is not below this share of what the sample says of it.
_CLEAR = 0.9

# A payload and the name of its form.
_Candidate = tuple[bytes, str]


def choose_payload(
    old: U8 | Payload | None,
    new: U8 | Payload,
    *,
    element_bytes: int,
    float_order: bool,
    frame_bytes: int = FRAME_BYTES,
    level: int = 1,
    where: Where = NOWHERE,
) -> tuple[bytes | None, str]:
    """(payload, name of its form); (None, "unchanged") if `old` is given and equal to `new`.

    Both are read several times: whole arrays or sources, no iterators. Without `old` the payload needs no base.
    """
    nbytes = total_bytes(new, nbytes=None, where=where)
    options = _Options(element_bytes, float_order, frame_bytes, level, where)
    best: _Candidate | None = None
    if old is not None:
        steps = Gs01Steps(old, new, element_bytes=element_bytes, float_order=float_order, where=where)
        if not steps.changed:
            return None, UNCHANGED
        best = _choose_steps(old, new, steps, options, nbytes)
    return _choose_full(new, best, options, nbytes)


class _Options:
    def __init__(self, element_bytes: int, float_order: bool, frame_bytes: int, level: int, where: Where) -> None:
        self.element_bytes = element_bytes
        self.float_order = float_order
        self.frame_bytes = frame_bytes
        self.level = level
        self.where = where

    def encode(self, old: U8 | Payload | None, new: U8 | Payload, transform: int) -> _Candidate:
        payload = encode_gf01(
            old,
            new,
            transform=transform,
            element_bytes=self.element_bytes,
            float_order=self.float_order,
            frame_bytes=self.frame_bytes,
            level=self.level,
            where=self.where,
        )
        return payload or b"", f"GF01 {TRANSFORM_NAMES[transform]}"


def _choose_steps(old: U8 | Payload, new: U8 | Payload, steps: Gs01Steps, options: _Options, nbytes: int) -> _Candidate:
    """What is made of the difference: steps where it is sparse, else the smaller of steps and step planes."""
    share = steps.nbytes / max(1, nbytes)
    if share <= _SPARSE or (share <= _DENSE and _promised_planes(old, new, options, nbytes) >= share):
        return _encode_steps(steps)
    planes = options.encode(old, new, STEP_PLANES)
    if len(planes[0]) <= steps.nbytes:
        return planes
    sparse = _encode_steps(steps)
    return sparse if len(sparse[0]) < len(planes[0]) else planes


def _encode_steps(steps: Gs01Steps) -> _Candidate:
    payload = steps.encode()
    return payload, payload[:4].decode()


def _promised_planes(old: U8 | Payload, new: U8 | Payload, options: _Options, nbytes: int) -> float:
    """What step planes take of the tensor, by a sample."""
    before, after = _sample(old, nbytes), _sample(new, nbytes)
    return len(options.encode(before, after, STEP_PLANES)[0]) / max(1, len(after))


def _choose_full(new: U8 | Payload, best: _Candidate | None, options: _Options, nbytes: int) -> _Candidate:
    """`best`, or a full form if that is smaller."""
    if best is not None and len(best[0]) <= _NEGLIGIBLE * nbytes:
        return best
    transforms = [FULL] if options.element_bytes == 1 else [FULL_PLANES, FULL]
    sample = _sample(new, nbytes)
    promised = {transform: len(options.encode(None, sample, transform)[0]) for transform in transforms}
    for transform in sorted(promised, key=lambda each: promised[each]):
        ratio = promised[transform] / max(1, len(sample))
        if best is None or len(best[0]) > _CLEAR * ratio * nbytes:
            full = options.encode(None, new, transform)
            best = full if best is None or len(full[0]) < len(best[0]) else best
    return best if best is not None else options.encode(None, new, FULL)


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
