"""overwrite payloads: a count, byte positions, values."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.codec import WINDOW_BYTES, MemoryPayload, encode_overwrite, open_delta, would_be
from gpusync.codec.overwrite_runs import open_runs
from gpusync.errors import NOWHERE, LayoutError, PayloadError, UnsupportedFormatError

SIZES = [0, 1, 63, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 2 * WINDOW_BYTES + 12_345]


def content_of(positions, values, count=None):
    count = len(positions) if count is None else count
    return struct.pack(f"<I{len(positions)}I", count, *positions) + bytes(values)


def overwrite_by_hand(positions, values, count=None):
    return zstandard.ZstdCompressor(level=1).compress(content_of(positions, values, count))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("density", [0.005, 1.0])
def test_decodes_what_was_encoded(decode, decode_by_would_be, changed, nbytes, density):
    pair = changed(nbytes, density=density)
    payload = encode_overwrite(pair.old, pair.new)
    if nbytes == 0:
        assert payload is None
        return
    np.testing.assert_array_equal(decode(payload, pair.old, encoding="overwrite"), pair.new)
    np.testing.assert_array_equal(decode_by_would_be(payload, pair.old, encoding="overwrite"), pair.new)


@given(data=st.data(), nbytes=st.integers(0, 300), window=st.integers(1, 301))
def test_any_bytes_and_any_window(decode, data, nbytes, window):
    old, new = (np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8) for _ in range(2))
    payload = encode_overwrite(old, new, window_bytes=window)
    if payload is None:
        np.testing.assert_array_equal(old, new)
    else:
        np.testing.assert_array_equal(decode(payload, old, encoding="overwrite", window_bytes=window), new)


@pytest.mark.parametrize("window", [1 << 12, 99_991, WINDOW_BYTES, WINDOW_BYTES + 1, 1 << 23])
def test_window_size_changes_nothing(decode, changed, window):
    pair = changed(2 * WINDOW_BYTES + 12_345)
    payload = encode_overwrite(pair.old, pair.new)
    np.testing.assert_array_equal(decode(payload, pair.old, encoding="overwrite", window_bytes=window), pair.new)


def test_golden_frame_written_by_hand(decode):
    # raw single-segment frame of 14 bytes: two changes, 5 -> aa and 2 -> bb (not ascending: legal)
    payload = bytes.fromhex("28b52ffd200e" + "710000" + "02000000" + "05000000" + "02000000" + "aabb")
    new = decode(payload, np.zeros(6, np.uint8), encoding="overwrite")
    np.testing.assert_array_equal(new, [0, 0, 0xBB, 0, 0, 0xAA])


def test_our_payload_is_what_the_format_says(changed):
    pair = changed(WINDOW_BYTES + 777)
    content = zstandard.decompress(encode_overwrite(pair.old, pair.new))
    assert content == content_of(pair.positions.tolist(), pair.new[pair.positions])


@given(
    positions=st.lists(st.integers(0, 499), unique=True),
    window=st.integers(1, 501),
    seed=st.integers(0, 9),
)
def test_positions_in_any_order(decode, positions, window, seed):
    old = np.random.default_rng(seed).integers(0, 256, 500, dtype=np.uint8)
    values = np.random.default_rng(seed + 10).integers(0, 256, len(positions), dtype=np.uint8)
    expected = old.copy()
    expected[positions] = values
    payload = overwrite_by_hand(positions, values)
    np.testing.assert_array_equal(decode(payload, old, encoding="overwrite", window_bytes=window), expected)


def test_values_equal_to_the_old_ones_are_legal(decode):
    old = np.arange(10, dtype=np.uint8)
    np.testing.assert_array_equal(decode(overwrite_by_hand([3], [3]), old, encoding="overwrite"), old)


def test_no_changes_at_all(decode):
    old = np.arange(10, dtype=np.uint8)
    np.testing.assert_array_equal(decode(overwrite_by_hand([], []), old, encoding="overwrite"), old)
    assert len(decode(overwrite_by_hand([], []), old[:0], encoding="overwrite")) == 0


def test_equal_states_have_no_payload():
    old = np.arange(200, dtype=np.uint8)
    assert encode_overwrite(old, old.copy()) is None


@pytest.mark.parametrize(
    ("positions", "values", "count", "what"),
    [
        ([1, 2], [7, 7], 3, "count"),
        ([1, 2], [7, 7], 1, "count"),
        ([1, 2], [7, 7], 0, "count"),
        ([1, 2], [7, 7], 0xFFFFFFFF, "count"),
        ([1, 2], [7], 2, "impossible size"),
        ([1, 2], [7, 7, 7], 2, "impossible size"),
        ([1, 2], [7] * 7, 2, "count"),
        (list(range(11)), [7] * 11, 11, "impossible size"),
        ([10], [7], 1, "past the tensor's end"),
        ([3, 10, 4], [7] * 3, 3, "past the tensor's end"),
        ([0xFFFFFFFF], [7], 1, "past the tensor's end"),
        ([4, 4], [1, 2], 2, "twice"),
        ([4, 4], [1, 1], 2, "twice"),
        ([4, 9, 0, 9], [1, 2, 3, 4], 4, "twice"),
    ],
)
def test_refused(decode, told, positions, values, count, what):
    with pytest.raises(PayloadError, match=what) as caught:
        decode(overwrite_by_hand(positions, values, count), np.zeros(10, np.uint8), encoding="overwrite")
    told(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0\0\0", bytes(5), bytes(8)])
def test_content_that_is_no_list(decode, content):
    with pytest.raises(PayloadError, match="impossible size"):
        decode(zstandard.compress(content), np.zeros(10, np.uint8), encoding="overwrite")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f: f + f, "second"),
        (lambda f: f + b"\0", "follow"),
        (lambda f: f[:-1], "cut"),
        (lambda f: b"junk" + f, "no zstd frame"),
        (lambda f: zstandard.ZstdCompressor(write_content_size=False).compress(b"1234"), "no content size"),
    ],
)
@pytest.mark.parametrize("nbytes", [10, 0])
def test_damaged_frame(decode, change, what, nbytes):
    payload = overwrite_by_hand([1], [2]) if nbytes else overwrite_by_hand([], [])
    with pytest.raises(PayloadError, match=what):
        decode(change(payload), np.zeros(nbytes, np.uint8), encoding="overwrite")


# The three ways through a payload: small ones are held, others streamed or, when not ascending, read in groups.


def runs_of(positions, values, nbytes, **limits):
    payload = MemoryPayload(overwrite_by_hand(positions, values))
    runs = list(open_runs(payload, count=len(positions), nbytes=nbytes, where=NOWHERE, **limits))
    return np.concatenate([p for p, _ in runs]), np.concatenate([v for _, v in runs]), len(runs)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("limits", [{}, {"held_bytes": 0}, {"held_bytes": 0, "group_changes": 20_000}])
def test_every_way_gives_the_same_changes(ascending, limits):
    nbytes, count = 60_000_001, 200_000
    rng = np.random.default_rng(5)
    positions = rng.choice(nbytes, count, replace=False).astype(np.uint32)
    values = rng.integers(0, 256, count, dtype=np.uint8)
    order = np.argsort(positions)
    if ascending:
        positions, values, order = positions[order], values[order], np.arange(count)
    got_positions, got_values, runs = runs_of(positions.tolist(), values, nbytes, **limits)
    np.testing.assert_array_equal(got_positions, positions[order])
    np.testing.assert_array_equal(got_values, values[order])
    if not ascending and "group_changes" in limits:
        assert runs > 5


@pytest.mark.parametrize("limits", [{}, {"held_bytes": 0}])
@pytest.mark.parametrize("twice", [(70_000, 70_001), (0, 149_999)])
def test_duplicates_are_found_by_every_way(limits, twice):
    positions = np.arange(0, 300_000, 2)
    positions[twice[1]] = positions[twice[0]]
    with pytest.raises(PayloadError, match=f"position {positions[twice[0]]} twice"):
        runs_of(positions.tolist(), bytes(150_000), 300_000, **limits)


def test_more_changes_than_bytes_in_a_stretch():
    with pytest.raises(PayloadError, match="twice"):
        runs_of([1, 0] * 5000, bytes(10_000), 20_000_000, held_bytes=0)


def test_so_many_passes_that_it_would_not_end():
    positions = np.arange(400_000)[::-1] * 10_000
    with pytest.raises(UnsupportedFormatError, match="must have ascending positions"):
        runs_of(positions.tolist(), bytes(400_000), 4_000_000_001, held_bytes=0, group_changes=1000)


def test_streamed_run_notices_that_the_file_changed():
    first, later = overwrite_by_hand([1, 2, 3], b"abc"), overwrite_by_hand([1, 3, 2], b"abc")
    assert len(first) == len(later)

    class Swapped(MemoryPayload):
        reads = 0

        def read_into(self, offset, buffer):
            # Two reads for the scan (head, frame), two for the values; the fifth opens the positions.
            Swapped.reads += 1
            MemoryPayload(first if Swapped.reads < 5 else later).read_into(offset, buffer)

    with pytest.raises(PayloadError, match="changed while it was read"):
        list(open_runs(Swapped(first), count=3, nbytes=9, where=NOWHERE, held_bytes=0))


class Fake:
    """A tensor of which only the size is real: zeros, and one byte here and there."""

    def __init__(self, nbytes, ones=()):
        self.nbytes = nbytes
        self.ones = ones

    def read_into(self, offset, buffer):
        window = np.frombuffer(buffer, np.uint8)
        window[:] = 0
        for at in self.ones:
            if offset <= at < offset + len(window):
                window[at - offset] = 1


@pytest.mark.parametrize("nbytes", [1 << 32, (1 << 32) + 5, 1 << 40])
def test_tensor_of_4_gib_cannot_be_encoded(nbytes, place, told):
    with pytest.raises(UnsupportedFormatError, match="too large") as caught:
        encode_overwrite(Fake(nbytes), Fake(nbytes, ones=[1]), where=place)
    assert caught.value.found == nbytes
    told(caught.value)
    with pytest.raises(UnsupportedFormatError):
        encode_overwrite(iter(()), iter(()), nbytes=nbytes)


def test_largest_tensor_that_can_be_encoded():
    last = (1 << 32) - 2
    payload = encode_overwrite(Fake(last + 1), Fake(last + 1, ones=[last]))
    assert zstandard.decompress(payload) == content_of([last], [1])


def test_tensor_above_4_gib_takes_positions_up_to_2_to_the_32():
    nbytes, last = (1 << 32) + WINDOW_BYTES + 3, (1 << 32) - 1
    payload = MemoryPayload(overwrite_by_hand([5, last], b"\x07\x08"))
    decoder = open_delta(payload, encoding="overwrite", nbytes=nbytes, element_bytes=1, float_order=False)
    found = {}
    for offset, _, new in would_be(Fake(nbytes), [decoder], nbytes=nbytes):
        found |= {offset + at: new[at] for at in np.flatnonzero(new).tolist()}
    assert found == {5: 7, last: 8}


def test_windows_of_another_tensor():
    with pytest.raises(LayoutError):
        encode_overwrite(np.zeros(9, np.uint8), np.ones(8, np.uint8))
