"""xor payloads: one frame, as long as the tensor."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.codec import WINDOW_BYTES, MemoryPayload, XorDecoder, encode_xor
from gpusync.errors import LayoutError, PayloadError

# Nothing, one byte, less than a word, the window and its neighbours, several windows with an odd rest.
SIZES = [0, 1, 63, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 2 * WINDOW_BYTES + 12_345]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("density", [0.005, 1.0])
def test_decodes_what_was_encoded(decode, decode_by_would_be, changed, nbytes, density):
    pair = changed(nbytes, density=density)
    payload = encode_xor(pair.old, pair.new)
    if nbytes == 0:
        assert payload is None
        return
    np.testing.assert_array_equal(decode(payload, pair.old, encoding="xor"), pair.new)
    np.testing.assert_array_equal(decode_by_would_be(payload, pair.old, encoding="xor"), pair.new)


@given(data=st.data(), nbytes=st.integers(0, 300), window=st.integers(1, 301))
def test_any_bytes_and_any_window(decode, data, nbytes, window):
    old, new = (np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8) for _ in range(2))
    payload = encode_xor(old, new, window_bytes=window)
    if payload is None:
        np.testing.assert_array_equal(old, new)
    else:
        np.testing.assert_array_equal(decode(payload, old, encoding="xor", window_bytes=window), new)


@pytest.mark.parametrize("window", [1 << 12, 99_991, WINDOW_BYTES, WINDOW_BYTES + 1, 1 << 23])
def test_window_size_changes_nothing(decode, changed, window):
    pair = changed(2 * WINDOW_BYTES + 12_345)
    payload = encode_xor(pair.old, pair.new)
    np.testing.assert_array_equal(decode(payload, pair.old, encoding="xor", window_bytes=window), pair.new)


def test_golden_frame_written_by_hand(decode):
    # a single-segment frame of 7 bytes: raw 01 80, then four bytes 00, then raw ff
    payload = bytes.fromhex("28b52ffd2007" + "1000000180" + "22000000" + "090000ff")
    old = np.array([0, 0x80, 3, 4, 5, 6, 0x0F], np.uint8)
    np.testing.assert_array_equal(decode(payload, old, encoding="xor"), [1, 0, 3, 4, 5, 6, 0xF0])


@pytest.mark.parametrize("level", [1, 3, 19])
def test_frame_of_another_writer(decode, changed, frame, level):
    pair = changed(100_001)
    np.testing.assert_array_equal(decode(frame(pair.old ^ pair.new, level=level), pair.old, encoding="xor"), pair.new)


def test_another_reader_takes_our_frame(changed):
    pair = changed(3 * WINDOW_BYTES + 5)
    payload = encode_xor(pair.old, pair.new)
    assert zstandard.get_frame_parameters(payload).content_size == len(pair.old)
    np.testing.assert_array_equal(np.frombuffer(zstandard.decompress(payload), np.uint8), pair.old ^ pair.new)


def test_empty_tensor_with_a_frame_of_nothing(decode, frame):
    assert len(decode(frame(b""), np.empty(0, np.uint8), encoding="xor")) == 0


@pytest.mark.parametrize("stored", [b"", b"\0", zstandard.compress(b"a"), zstandard.compress(b"") + b"\0"])
def test_empty_tensor_with_anything_else(decode, stored):
    with pytest.raises(PayloadError):
        decode(stored, np.empty(0, np.uint8), encoding="xor")


@pytest.mark.parametrize("extra", [-9, -1, 1, 9])
def test_payload_of_another_length(decode, frame, told, extra):
    with pytest.raises(PayloadError, match="another content size") as caught:
        decode(frame(bytes(1000 + extra)), np.zeros(1000, np.uint8), encoding="xor")
    assert (caught.value.expected, caught.value.found) == (1000, 1000 + extra)
    told(caught.value)


@pytest.mark.parametrize("add", [b"\0", bytes(5), zstandard.compress(b"more")])
def test_bytes_behind_the_frame(decode, changed, told, add):
    pair = changed(1000)
    with pytest.raises(PayloadError, match="follow") as caught:
        decode(encode_xor(pair.old, pair.new) + add, pair.old, encoding="xor")
    told(caught.value)


@pytest.mark.parametrize("nbytes", [0, 1, 2 * WINDOW_BYTES + 1])
def test_equal_states_have_no_payload(nbytes):
    old = np.full(nbytes, 7, np.uint8)
    assert encode_xor(old, old.copy()) is None


@pytest.mark.parametrize("at", [0, WINDOW_BYTES, 2 * WINDOW_BYTES + 4])
def test_a_single_changed_byte_is_found(decode, at):
    old = np.zeros(2 * WINDOW_BYTES + 5, np.uint8)
    new = old.copy()
    new[at] = 1
    np.testing.assert_array_equal(decode(encode_xor(old, new), old, encoding="xor"), new)


@pytest.mark.parametrize("cut", [1, 1000, 4096])
def test_arrays_sources_and_windows_give_one_payload(changed, cut):
    pair = changed(9_001)
    expected = np.frombuffer(zstandard.decompress(encode_xor(pair.old, pair.new)), np.uint8)

    def windows(data):
        return (data[start : start + cut] for start in range(0, len(data), cut))

    for old, new in (
        (MemoryPayload(pair.old), MemoryPayload(pair.new)),
        (windows(pair.old), windows(pair.new)),
        (windows(pair.old), pair.new),
        (pair.old, MemoryPayload(pair.new)),
    ):
        payload = encode_xor(old, new, nbytes=9_001, window_bytes=cut)
        np.testing.assert_array_equal(np.frombuffer(zstandard.decompress(payload), np.uint8), expected)


@pytest.mark.parametrize(
    ("old", "new", "nbytes"),
    [
        (np.zeros(9, np.uint8), np.ones(8, np.uint8), None),
        (np.zeros(8, np.uint8), np.ones(9, np.uint8), None),
        (np.zeros(9, np.uint8), np.ones(9, np.uint8), 10),
        (np.zeros(9, np.uint8), [np.ones(9, np.uint8)], None),
        ([np.zeros(9, np.uint8)], [np.ones(9, np.uint8)], 10),
        ([np.zeros(4, np.uint8)] * 2, [np.ones(8, np.uint8)], 8),
        ([np.zeros(4, np.uint8)], [np.ones(4, np.uint8)] * 2, 8),
    ],
)
def test_states_that_do_not_fit_each_other(old, new, nbytes):
    with pytest.raises(LayoutError):
        encode_xor(old, new, nbytes=nbytes)


@pytest.mark.parametrize(("offset", "size"), [(0, 4), (3, 4), (5, 4), (4, 7)])
def test_window_out_of_order_is_refused(frame, offset, size):
    decoder = XorDecoder(MemoryPayload(frame(bytes(10))), nbytes=10)
    decoder.apply(np.zeros(4, np.uint8), 0)
    with pytest.raises(LayoutError):
        decoder.apply(np.zeros(size, np.uint8), offset)


def test_finish_before_the_last_window(frame):
    decoder = XorDecoder(MemoryPayload(frame(bytes(10))), nbytes=10)
    decoder.apply(np.zeros(9, np.uint8), 0)
    with pytest.raises(LayoutError, match="before the tensor does"):
        decoder.finish()


@settings(max_examples=25)
@given(data=st.data())
def test_mutated_payload_never_escapes(decode, frame, data):
    payload = bytearray(frame(bytes(range(200)) * 3, write_checksum=True))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(payload), np.zeros(600, np.uint8), encoding="xor")
    except PayloadError:
        return


def test_memory_does_not_grow_with_the_tensor():
    nbytes = 48 << 20
    old, new = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    new[5::100_003] = 1
    tracemalloc.start()
    payload = encode_xor(old, new)
    decoder = XorDecoder(MemoryPayload(payload), nbytes=nbytes)
    decoder.apply(old, 0)
    decoder.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(old, new)
    assert peak < 6 << 20
