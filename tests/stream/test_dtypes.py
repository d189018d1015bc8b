"""Element widths and orders, as the payload formats count them."""

from __future__ import annotations

import pytest

from gpusync.stream import DTYPE_BITS, element_bytes, is_float_order

BYTES = {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"}
FLOATS = {"F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_element_bytes(dtype: str) -> None:
    expected = 1 if dtype in BYTES else 4 if dtype == "C64" else int(dtype.lstrip("BFIU")) // 8
    assert element_bytes(dtype) == expected


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_float_order(dtype: str) -> None:
    assert is_float_order(dtype) is (dtype in FLOATS)


@pytest.mark.parametrize("dtype", ["FUTURE_F12", "F8_E3M4", ""])
def test_unknown_dtype_is_bytes(dtype: str) -> None:
    assert (element_bytes(dtype), is_float_order(dtype)) == (1, False)
