"""What is known of the dtype names of safetensors: width, and the two facts our payload formats need of an element.

A dtype that is not listed is carried as opaque bytes; nothing here raises.
"""

from __future__ import annotations

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element, by safetensors dtype name."""

_SIGN_MAGNITUDE = frozenset(
    ("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")  # F8_E8M0 has no sign
)


def element_bytes(dtype: str) -> int:
    """Bytes of one element as the payload formats count them: 1, 2, 4 or 8.

    A C64 is two floats of 4 bytes. Sub-byte and unknown dtypes are treated as bytes.
    """
    if dtype == "C64":
        return 4
    return max(1, DTYPE_BITS.get(dtype, 8) // 8)


def is_float_order(dtype: str) -> bool:
    """True where the element is sign and magnitude, so that neighbouring values have neighbouring codes."""
    return dtype in _SIGN_MAGNITUDE
