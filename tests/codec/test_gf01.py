"""GF01 payloads against a builder written from the layout alone, and every rule of a reader."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.codec import FULL, FULL_PLANES, STEP_PLANES, XOR, MemoryPayload, encode_gf01, open_delta, would_be
from gpusync.errors import LayoutError, PayloadError, UnsupportedFormatError

FRAME = 1 << 16
# Nothing, one element, less than a word, a frame and its neighbours, a window's neighbour, odd rests over planes.
SIZES = [0, 8, 56, FRAME - 8, FRAME, FRAME + 8, 3 * FRAME + 4104, (1 << 20) - 8, (1 << 20) + 24]
TRANSFORMS = [XOR, FULL_PLANES, FULL]


def raw_of(old, new, transform, es):
    if transform == XOR:
        return (old ^ new).tobytes()
    return new.reshape(-1, es).T.tobytes() if transform == FULL_PLANES else new.tobytes()


def build(raw, *, transform=FULL, es=2, order=1, log2=16, **lies):
    """GF01 as PAYLOADS.md draws it. `lies` replace single fields."""
    frame_bytes = 1 << log2
    frames = [zstandard.compress(raw[at : at + frame_bytes], 3) for at in range(0, len(raw), frame_bytes)]
    frames = lies.get("frames", frames)
    sizes = lies.get("sizes", [len(frame) for frame in frames])
    head = struct.pack(
        "<4sBBBBQII",
        lies.get("magic", b"GF01"),
        transform,
        es,
        order,
        log2,
        lies.get("raw_bytes", len(raw)),
        lies.get("count", len(frames)),
        lies.get("reserved", 0),
    )
    table = struct.pack(f"<{len(sizes)}I", *sizes)
    start = head + table + lies.get("pad", b"\0") * (-len(head + table) % 8)
    body = b"".join(frames)
    return start + body + lies.get("end_pad", b"\0") * (-len(start + body) % 8) + lies.get("tail", b"")


def states(nbytes, *, density=0.02):
    rng = np.random.default_rng(nbytes)
    old = rng.integers(0, 256, nbytes, dtype=np.uint8)
    new = np.where(rng.random(nbytes) < density, rng.integers(0, 256, nbytes, dtype=np.uint8), old)
    return old, new.astype(np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("es", [1, 2, 4, 8])
def test_decodes_what_the_layout_says(decode, nbytes, transform, es):
    old, new = states(nbytes)
    payload = build(raw_of(old, new, transform, es), transform=transform, es=es)
    start = old if transform == XOR else np.full(nbytes, 0xA5, np.uint8)
    for window in (1 << 20, 65_521, 1 << 21):
        got = decode(payload, start, encoding="gpusync", element_bytes=es, window_bytes=window)
        np.testing.assert_array_equal(got, new)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("es", [1, 2, 4, 8])
@pytest.mark.parametrize("frame_bytes", [FRAME, 1 << 20])
def test_encoder_writes_the_layout(nbytes, transform, es, frame_bytes):
    old, new = states(nbytes)
    given_old = old if transform == XOR else None
    payload = encode_gf01(
        given_old, new, transform=transform, element_bytes=es, float_order=True, frame_bytes=frame_bytes
    )
    if payload is None:
        np.testing.assert_array_equal(old, new)
        return
    raw = raw_of(old, new, transform, es)
    pieces = [raw[at : at + frame_bytes] for at in range(0, nbytes, frame_bytes)]
    frames = [zstandard.compress(piece, 1) for piece in pieces]
    assert payload == build(raw, transform=transform, es=es, order=1, log2=frame_bytes.bit_length() - 1, frames=frames)


@given(
    data=st.data(),
    es=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 60),
    window=st.integers(1, 100),
    transform=st.sampled_from(TRANSFORMS),
)
def test_any_elements_and_any_window(decode_by_would_be, data, es, count, window, transform):
    nbytes = es * count
    old, new = (np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8) for _ in range(2))
    payload = encode_gf01(
        old if transform == XOR else None, new, transform=transform, element_bytes=es, float_order=False
    )
    if payload is None:
        np.testing.assert_array_equal(old, new)
        return
    for base in [True] if transform == XOR else [True, False]:
        got = decode_by_would_be(payload, old, encoding="gpusync", element_bytes=es, window_bytes=window, base=base)
        np.testing.assert_array_equal(got, new)


def test_golden_planes_written_by_hand(decode):
    # three little-endian words 0x0201, 0x0403, 0x0605: low bytes first, then high bytes, one raw frame of 6 bytes
    frame = bytes.fromhex("28b52ffd2006" + "310000" + "010305020406")
    head = b"GF01" + bytes([2, 2, 1, 16]) + struct.pack("<QIII", 6, 1, 0, len(frame)) + bytes(4)
    payload = head + frame + bytes(1)
    assert len(payload) % 8 == 0
    got = decode(payload, np.zeros(6, np.uint8), encoding="gpusync", element_bytes=2)
    np.testing.assert_array_equal(got, [1, 2, 3, 4, 5, 6])


def test_no_bytes_make_24_bytes(decode):
    payload = encode_gf01(None, np.empty(0, np.uint8), transform=FULL, element_bytes=2, float_order=True)
    assert payload == b"GF01" + bytes([3, 2, 1, 16]) + bytes(16)
    assert len(decode(payload, np.empty(0, np.uint8), encoding="gpusync", element_bytes=2)) == 0


SOUND = np.random.default_rng(1).integers(0, 4, 2 * FRAME + 100, dtype=np.uint8).tobytes()
CUT = [SOUND[at : at + FRAME] for at in range(0, len(SOUND), FRAME)]
FRAMES = [zstandard.compress(piece) for piece in CUT]
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(CUT[1])
CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(CUT[1])
WITH_DICT = zstandard.ZstdCompressor(
    dict_data=zstandard.train_dictionary(4096, [bytes([i, i // 2, 7]) * 50 for i in range(200)])
).compress(CUT[1])


def second(frame):
    return {"frames": [FRAMES[0], frame, FRAMES[2]]}


@pytest.mark.parametrize(
    ("lies", "what"),
    [
        ({"magic": b"GF00"}, "none of gpusync's forms"),
        ({"magic": b"\0\0\0\0"}, "none of gpusync's forms"),
        ({"transform": 4}, "transform"),
        ({"transform": 255}, "transform"),
        ({"es": 1}, "element size"),
        ({"es": 0}, "element size"),
        ({"es": 4}, "element size"),
        ({"order": 2}, "order"),
        ({"log2": 17, "frames": FRAMES}, "number of frames"),
        ({"log2": 15, "frames": FRAMES}, "log2"),
        ({"log2": 21, "frames": FRAMES}, "log2"),
        ({"log2": 255, "frames": FRAMES}, "log2"),
        ({"raw_bytes": len(SOUND) - 2}, "raw_bytes"),
        ({"raw_bytes": len(SOUND) + 2}, "raw_bytes"),
        ({"raw_bytes": 0}, "raw_bytes"),
        ({"raw_bytes": (1 << 64) - 1}, "raw_bytes"),
        ({"count": 2}, "number of frames"),
        ({"count": 4}, "number of frames"),
        ({"count": 0xFFFFFFFF}, "number of frames"),
        ({"frames": FRAMES[:2]}, "number of frames"),
        ({"frames": [*FRAMES, FRAMES[2]]}, "number of frames"),
        ({"reserved": 1}, "reserved"),
        ({"pad": b"\1"}, "padding"),
        ({"end_pad": b"\1"}, "padding"),
        ({"tail": bytes(8)}, "payload length"),
        ({"tail": b"\0"}, "payload length"),
        ({"sizes": [len(FRAMES[0]), len(FRAMES[1]), len(FRAMES[2]) + 8]}, "payload length"),
        ({"sizes": [len(FRAMES[0]), len(FRAMES[1]), 0]}, "payload length"),
        ({"sizes": [len(FRAMES[0]) - 1, len(FRAMES[1]) + 1, len(FRAMES[2])]}, "frame 0"),
        ({"sizes": [len(FRAMES[0]) + 1, len(FRAMES[1]) - 1, len(FRAMES[2])]}, "frame 0"),
        ({"sizes": [0, len(FRAMES[0]) + len(FRAMES[1]), len(FRAMES[2])]}, "frame 0"),
        ({"sizes": [len(FRAMES[0]) + len(FRAMES[1]), 0, len(FRAMES[2])]}, "frame 0"),
        ({"sizes": [0xFFFFFFFF] * 3}, "larger than it can be"),
        (second(SIZELESS), "frame 1: .*no content size"),
        (second(WITH_DICT), "frame 1: .*dictionary"),
        (second(FRAMES[1] + b"\0"), "frame 1"),
        (second(FRAMES[1] + zstandard.compress(b"")), "frame 1"),
        (second(FRAMES[1][:-1]), "frame 1"),
        (second(b""), "frame 1: .*no zstd frame"),
        (second(bytes.fromhex("502a4d18") + bytes(4) + FRAMES[1]), "frame 1: .*no zstd frame"),
        (second(zstandard.compress(CUT[1][:-1])), "frame 1: .*another content size"),
        (second(zstandard.compress(CUT[1] + b"x")), "frame 1: .*another content size"),
        (second(zstandard.compress(bytes(1 << 28))), "frame 1: .*another content size"),
        (second(CHECKED[:-1] + bytes([CHECKED[-1] ^ 1])), "frame 1"),
        (second(CHECKED[:-1]), "frame 1"),
    ],
)
def test_refused(decode, told, lies, what):
    with pytest.raises(PayloadError, match=what) as caught:
        decode(build(SOUND, **lies), np.zeros(len(SOUND), np.uint8), encoding="gpusync", element_bytes=2)
    told(caught.value)


@pytest.mark.parametrize("cut", [0, 3, 4, 23, 24, 30, 35, 36, 40, 1000, -1])
def test_cut_payload(decode, told, cut):
    with pytest.raises(PayloadError) as caught:
        decode(build(SOUND)[:cut], np.zeros(len(SOUND), np.uint8), encoding="gpusync", element_bytes=2)
    told(caught.value)


def test_frame_with_a_content_checksum_is_accepted(decode):
    payload = build(SOUND, **second(CHECKED))
    got = decode(payload, np.zeros(len(SOUND), np.uint8), encoding="gpusync", element_bytes=2)
    assert got.tobytes() == SOUND


@pytest.mark.parametrize("tail", [bytes(4), bytes(8), b"\1" * 8])
def test_no_bytes_and_something_behind(decode, tail):
    with pytest.raises(PayloadError, match="payload length"):
        decode(build(b"", tail=tail), np.empty(0, np.uint8), encoding="gpusync", element_bytes=2)


def test_tensor_without_whole_elements(decode):
    with pytest.raises(PayloadError, match="elements"):
        decode(build(bytes(9), es=2), np.zeros(9, np.uint8), encoding="gpusync", element_bytes=2)


@given(data=st.data())
def test_mutated_payload_never_escapes(decode, data):
    payload = bytearray(build(SOUND[:500], transform=data.draw(st.sampled_from(TRANSFORMS))))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(payload), np.zeros(500, np.uint8), encoding="gpusync", element_bytes=2)
    except (PayloadError, UnsupportedFormatError):
        return


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_frame_is_fetched_and_decoded_but_once(transform):
    """Windows smaller than frames, and planes that start inside a frame, must not decode frames again and again."""
    nbytes, es = 6 * FRAME + 32, 2
    old, new = states(nbytes)
    payload = build(raw_of(old, new, transform, es), transform=transform, es=es)
    fetched = []

    class Recording(MemoryPayload):
        def read_into(self, offset, buffer):
            fetched.append(len(buffer))
            super().read_into(offset, buffer)

    decoder = open_delta(Recording(payload), encoding="gpusync", nbytes=nbytes, element_bytes=es, float_order=False)
    assert decoder.needs_base is (transform == XOR)
    for _ in would_be(MemoryPayload(old), [decoder], nbytes=nbytes, window_bytes=5000):
        pass
    # One frame holds the border of the planes; readahead of one plane covers some of the next one's.
    assert sum(fetched) < 2 * len(payload) + 1000
    assert max(fetched) <= 1 << 19


@pytest.mark.parametrize("cut", [1000, 4096, 100_000])
def test_arrays_sources_and_windows_give_one_payload(cut):
    old, new = states(3 * FRAME + 4104)

    def windows(data):
        return (data[start : start + cut] for start in range(0, len(data), cut))

    for transform in TRANSFORMS:
        options = {"transform": transform, "element_bytes": 4, "float_order": True}
        expected = encode_gf01(old, new, **options)
        assert encode_gf01(MemoryPayload(old), MemoryPayload(new), window_bytes=cut, **options) == expected
        assert encode_gf01(windows(old), windows(new), nbytes=len(new), **options) == expected
        if transform != XOR:
            assert encode_gf01(None, windows(new), nbytes=len(new), **options) == expected


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("nbytes", [0, 8, FRAME * 40])
def test_equal_states_have_no_payload(transform, nbytes):
    old = np.full(nbytes, 3, np.uint8)
    assert encode_gf01(old, old.copy(), transform=transform, element_bytes=2, float_order=True) is None


@pytest.mark.parametrize(
    ("old", "new", "options"),
    [
        (None, bytes(8), {"transform": XOR}),
        (bytes(8), bytes(9), {"element_bytes": 1}),
        (None, bytes(9), {}),
        (None, bytes(8), {"element_bytes": 0}),
        (None, bytes(8), {"frame_bytes": 1 << 15}),
        (None, bytes(8), {"frame_bytes": 1 << 21}),
        (None, bytes(8), {"frame_bytes": 100_000}),
        (None, bytes(8), {"nbytes": 10}),
    ],
)
def test_encoder_refuses_what_does_not_fit(old, new, options):
    arrays = [None if data is None else np.frombuffer(data, np.uint8) for data in (old, new)]
    with pytest.raises(LayoutError):
        encode_gf01(*arrays, **({"transform": FULL_PLANES, "element_bytes": 2, "float_order": True} | options))


def test_window_that_cuts_an_element():
    windows = [np.zeros(3, np.uint8), np.zeros(5, np.uint8)]
    with pytest.raises(LayoutError, match="cuts an element"):
        encode_gf01(None, windows, transform=FULL_PLANES, element_bytes=2, float_order=True, nbytes=8)


def steps_of(old, new, es, order):
    """Step planes in Python's integers, from their description."""
    bits = 8 * es
    mask, low = (1 << bits) - 1, (1 << bits - 1) - 1
    flip = lambda w: w ^ low if order and w >> bits - 1 else w  # noqa: E731
    coded = []
    for before, after in zip(old.view(f"<u{es}").tolist(), new.view(f"<u{es}").tolist(), strict=True):
        d = flip(after) - flip(before) & mask
        d -= (d >> bits - 1) << bits
        coded.append((d << 1 ^ d >> bits - 1) & mask)
    return np.array(coded, f"<u{es}").view(np.uint8).reshape(-1, es).T.tobytes()


@pytest.mark.parametrize("nbytes", [0, 8, 56, 6000, FRAME + 8])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("es", [1, 2, 4, 8])
def test_step_planes(decode_by_would_be, nbytes, es, order):
    old, new = states(nbytes)
    payload = encode_gf01(old, new, transform=STEP_PLANES, element_bytes=es, float_order=bool(order))
    if payload is None:
        np.testing.assert_array_equal(old, new)
        return
    raw = steps_of(old, new, es, order)
    frames = [zstandard.compress(raw[at : at + FRAME], 1) for at in range(0, nbytes, FRAME)]
    assert payload == build(raw, transform=STEP_PLANES, es=es, order=order, frames=frames)
    for window in (1 << 20, 65_521, 3):
        if window > 3 or nbytes < 100:
            got = decode_by_would_be(payload, old, encoding="gpusync", element_bytes=es, window_bytes=window)
            np.testing.assert_array_equal(got, new)


def test_step_planes_need_old_words_and_whole_elements():
    old, new = states(80)
    with pytest.raises(LayoutError, match="step planes without old bytes"):
        encode_gf01(None, new, transform=STEP_PLANES, element_bytes=2, float_order=True)
    payload = encode_gf01(old, new ^ 1, transform=STEP_PLANES, element_bytes=8, float_order=True)
    decoder = open_delta(MemoryPayload(payload), encoding="gpusync", nbytes=80, element_bytes=8, float_order=True)
    assert decoder.needs_base
    with pytest.raises(LayoutError, match="cuts an element"):
        decoder.apply(old[:12].copy(), 0)


@pytest.mark.parametrize("transform", [XOR, STEP_PLANES, FULL_PLANES, FULL])
def test_raw_bytes_are_read_from_anywhere(transform):
    """What a device takes: planes as they are, in the size that it likes, beside the windows."""
    old, new = states(3 * FRAME + 4104)
    raw = steps_of(old, new, 2, 1) if transform == STEP_PLANES else raw_of(old, new, transform, 2)
    payload = build(raw, transform=transform)
    decoder = open_delta(
        MemoryPayload(payload), encoding="gpusync", nbytes=len(raw), element_bytes=2, float_order=False
    )
    assert (decoder.transform, decoder.element_bytes, decoder.float_order) == (transform, 2, True)
    assert decoder.raw_bytes == len(raw)
    for offset, nbytes in ((0, len(raw)), (FRAME - 3, 7), (len(raw) - 1, 1), (5, 0), (0, 9)):
        out = np.full(nbytes + 2, 0xA5, np.uint8)
        decoder.read_raw(offset, out[1:-1])
        assert out.tobytes() == b"\xa5" + raw[offset : offset + nbytes] + b"\xa5"
    with pytest.raises(LayoutError, match="outside"):
        decoder.read_raw(len(raw) - 1, np.empty(2, np.uint8))
