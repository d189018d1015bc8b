"""Which decoder opens which payload."""

import numpy as np
import pytest
import zstandard

from gpusync.codec import (
    FULL,
    FULL_PLANES,
    XOR,
    MemoryPayload,
    apply_whole,
    choose_payload,
    encode_gf01,
    encode_gs01,
    encode_overwrite,
    encode_xor,
    open_delta,
)
from gpusync.errors import LayoutError, PayloadError, UnsupportedFormatError

OLD = np.arange(200, dtype=np.uint8)
NEW = OLD.copy()
NEW[[3, 77, 199]] = 1


def gf01(transform):
    return encode_gf01(OLD, NEW, transform=transform, element_bytes=2, float_order=True)


PAYLOADS = [
    ("xor", encode_xor(OLD, NEW), True),
    ("overwrite", encode_overwrite(OLD, NEW), True),
    ("gpusync", encode_gs01(OLD, NEW, element_bytes=2, float_order=True), True),
    ("gpusync", choose_payload(OLD, NEW, element_bytes=2, float_order=True)[0], True),
    ("gpusync", gf01(XOR), True),
    ("gpusync", gf01(FULL_PLANES), False),
    ("gpusync", gf01(FULL), False),
]


@pytest.mark.parametrize(("encoding", "payload", "needs_base"), PAYLOADS)
def test_opens_by_name(encoding, payload, needs_base):
    target = OLD.copy()
    apply_whole(MemoryPayload(payload), target, encoding=encoding, element_bytes=2, float_order=True, window_bytes=31)
    np.testing.assert_array_equal(target, NEW)
    decoder = open_delta(MemoryPayload(payload), encoding=encoding, nbytes=200, element_bytes=2, float_order=True)
    assert decoder.needs_base is needs_base


# An overwrite payload does not say how long its tensor is: only a tensor that is too short shows.
OTHER_SIZES = [
    (*opened[:2], nbytes)
    for opened in PAYLOADS
    for nbytes in (0, 2, 198, 202)
    if nbytes < 200 or opened[0] != "overwrite"
]


@pytest.mark.parametrize(("encoding", "payload", "nbytes"), OTHER_SIZES)
def test_payload_of_a_tensor_of_another_size(encoding, payload, nbytes, place, told):
    with pytest.raises(PayloadError) as caught:
        apply_whole(
            MemoryPayload(payload),
            np.zeros(nbytes, np.uint8),
            encoding=encoding,
            element_bytes=2,
            float_order=True,
            where=place,
        )
    told(caught.value)


@pytest.mark.parametrize("encoding", ["zzz", "", "XOR", "zstd"])
def test_unknown_encoding(encoding, place, told):
    with pytest.raises(UnsupportedFormatError, match="unknown delta encoding") as caught:
        open_delta(MemoryPayload(b""), encoding=encoding, nbytes=0, element_bytes=1, float_order=False, where=place)
    assert caught.value.found == encoding
    told(caught.value)


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (b"GS01" + bytes(20), PayloadError),
        (b"GP01" + bytes(20), PayloadError),
        (b"GP01", PayloadError),
        (b"GS02" + bytes(20), UnsupportedFormatError),
        (b"", PayloadError),
        (b"GF0", PayloadError),
        (zstandard.compress(bytes(8)), PayloadError),
    ],
)
def test_forms_of_our_own(stored, error, place, told):
    with pytest.raises(error) as caught:
        open_delta(MemoryPayload(stored), encoding="gpusync", nbytes=8, element_bytes=1, float_order=False, where=place)
    assert error is PayloadError or caught.value.found == stored[:4].decode()
    told(caught.value)


@pytest.mark.parametrize("stored", [b"GS02" + bytes(20), b"GQ01" + bytes(20)])
def test_what_is_no_form_names_those_there_are(stored):
    with pytest.raises((PayloadError, UnsupportedFormatError)) as caught:
        open_delta(MemoryPayload(stored), encoding="gpusync", nbytes=8, element_bytes=1, float_order=False)
    assert caught.value.expected == "GS01, GP01 or GF01"


def test_target_must_be_flat():
    payload = MemoryPayload(encode_xor(OLD, NEW))
    with pytest.raises(LayoutError, match="one-dimensional"):
        apply_whole(payload, OLD.copy().reshape(2, 100), encoding="xor", element_bytes=1, float_order=False)
