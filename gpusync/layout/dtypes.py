"""The dtypes that safetensors and torch both have, and which of them a loader may convert into which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpusync.stream import DTYPE_BITS

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}

TORCH_DTYPES = {
    name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)
}
"""By safetensors name. An older torch lacks some."""

SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""By torch dtype."""

CAST_SOURCES = frozenset(("F32", "BF16", "F16", "F8_E5M2", "F8_E4M3"))
CAST_TARGETS = frozenset(("F32", "BF16", "F16"))

# Words of the same width, to compare bytes: a NaN equals no float, not even itself.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_cast(source: str, target: str) -> bool:
    """True where a commit can write `target` from `source` by value, exactly as a loader's `copy_` does."""
    return source != target and source in CAST_SOURCES and target in CAST_TARGETS


def element_width(dtype: str) -> int:
    """Bytes of one torch element. An F4 element of torch is a pair."""
    return max(1, DTYPE_BITS[dtype] // 8)


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape torch gives a tensor that safetensors gives `shape`. Raises ValueError for an F4 that has no pairs."""
    if dtype != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise ValueError("an F4 tensor does not consist of pairs")
    return (*shape[:-1], shape[-1] // 2)
