"""Checksums by their wire names: published values, any cutting, and the text form."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.digest import (
    ALGORITHMS,
    digest_of,
    is_checksum,
    is_payload_checksum,
    new_digest,
    payload_checksum,
)
from gpusync.errors import UnsupportedFormatError, Where

# From the algorithms' own documents and test vectors.
PUBLISHED = [
    ("xxh3-128", b"", "99aa06d3014798d86001c324468d497f"),
    ("blake3", b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ("blake3", b"abc", "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"),
    ("adler32", b"", "00000001"),
    ("adler32", b"Wikipedia", "11e60398"),
]


@pytest.mark.parametrize(("algorithm", "data", "expected"), PUBLISHED)
def test_equals_the_published_value(algorithm, data, expected):
    assert digest_of(algorithm, data) == expected


def test_payload_checksum_equals_the_published_value():
    assert payload_checksum(b"") == "2d06800538d394c2"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(data=st.binary(max_size=700), cuts=st.lists(st.integers(0, 700), max_size=5))
def test_cutting_into_windows_changes_nothing(algorithm, data, cuts):
    digest = new_digest(algorithm)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        digest.update(np.frombuffer(data, np.uint8)[start:stop])
    assert digest.hexdigest() == digest_of(algorithm, data)
    assert is_checksum(algorithm, digest.hexdigest())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_flipped_bit_changes_the_digest(algorithm):
    data = bytearray(range(256)) * 5
    before = digest_of(algorithm, data)
    data[777] ^= 1
    assert digest_of(algorithm, data) != before


@pytest.mark.parametrize("buffer", [bytes(9), bytearray(9), memoryview(bytes(9)), np.zeros(9, np.uint8)])
def test_any_byte_buffer_gives_the_same_digest(buffer):
    assert digest_of("xxh3-128", buffer) == digest_of("xxh3-128", bytes(9))
    assert payload_checksum(buffer) == payload_checksum(bytes(9))


@pytest.mark.parametrize(
    ("algorithm", "text", "right"),
    [
        ("adler32", "0badcafe", True),
        ("adler32", "0BADCAFE", False),
        ("adler32", "badcafe", False),
        ("adler32", "0badcafe0", False),
        ("adler32", "0badcafg", False),
        ("adler32", " badcafe", False),
        ("adler32", 12345678, False),
        ("adler32", None, False),
        ("xxh3-128", "0" * 32, True),
        ("xxh3-128", "0" * 64, False),
        ("xxh3-128", "٠" * 32, False),
        ("blake3", "f" * 64, True),
        ("blake3", "f" * 32, False),
    ],
)
def test_form_of_a_checksum(algorithm, text, right):
    assert is_checksum(algorithm, text) is right


@pytest.mark.parametrize(("text", "right"), [("0" * 16, True), ("A" * 16, False), ("0" * 15, False), (0, False)])
def test_form_of_a_payload_checksum(text, right):
    assert is_payload_checksum(text) is right


@pytest.mark.parametrize("call", [new_digest, lambda name, where: digest_of(name, b"", where=where)])
def test_unknown_algorithm_is_named(call):
    with pytest.raises(UnsupportedFormatError) as caught:
        call("crc7", where=Where(path="weight_v000001", version=1))
    assert caught.value.found == "crc7"
    assert caught.value.version == 1
    assert "xxh3-128, blake3, adler32" in str(caught.value)
