"""GS01 payloads: exact for every bit pattern, alike in all decoders, and refused alike when one bit is wrong."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.codec import Gs01Decoder, Gs01Steps, MemoryPayload, encode_gs01, open_delta, would_be
from gpusync.codec.gs01_plan import field_bits
from gpusync.errors import LayoutError, PayloadError, UnsupportedFormatError
from gpusync_kernels import Payload, parse_blob, sparse_check, using_host_ops
from gpusync_kernels.word_order import from_order, to_order
from support.gp01 import unpack_gp01
from support.gs01 import read_gs01
from support.loops import loops_of

WIDTHS = [1, 2, 4, 8]
PIECE, PART = 1 << 20, 1 << 22


def corners(es):
    """Both zeros, subnormals, infinities and NaN payloads of the floats of that width, and the ends of the integers."""
    top = (1 << 8 * es) - 1
    middle = top >> 1
    exponents = {1: (0x78, 0x7C), 2: (0x7F80, 0x7C00), 4: (0x7F800000,), 8: (0x7FF0 << 48,)}[es]
    found = {0, 1, middle, middle + 1, middle + 2, top, top - 1}
    found |= {word for e in exponents for word in (e, e + 1, e - 1, e | middle + 1, (e | middle + 1) + 1)}
    return np.array(sorted(word & top for word in found), f"<u{es}")


def states(rng, count, *, es, order, density, kind):
    """(old, new) words. At a density of None one element changes."""
    top = (1 << 8 * es) - 1
    old = rng.integers(0, top, count, dtype=f"u{es}", endpoint=True)
    if kind == "corners":
        old = rng.choice(corners(es), count)
    new, some = old.copy(), np.zeros(count, bool)
    if density is None:
        some[rng.integers(count)] = True
    else:
        some[:] = rng.random(count) < density
    changed = int(some.sum())
    if kind == "steps":
        steps = rng.geometric(0.7, changed).astype(f"i{es}") * rng.choice(np.array([-1, 1], f"i{es}"), changed)
        new[some] = from_order(to_order(old[some], order) + steps, order)
    elif kind == "signs":
        new[some] ^= np.array(top // 2 + 1, f"u{es}")
    elif kind == "corners":
        new[some] = rng.choice(corners(es), changed)
    else:
        new[some] = rng.integers(0, top, changed, dtype=f"u{es}", endpoint=True)
    return old, new


class Mapped(MemoryPayload):
    """Zeros, and ones where it was changed, without memory behind them."""

    def __init__(self, nbytes, positions):
        super().__init__(b"")
        self._nbytes, self._positions = nbytes, positions

    @property
    def nbytes(self):
        return self._nbytes

    def read_into(self, offset, buffer):
        window = np.frombuffer(buffer, np.uint8)
        window[:] = 0
        inside = (self._positions >= offset) & (self._positions < offset + len(window))
        window[self._positions[inside] - offset] = 1


def encode_steps(old, new, order):
    """What a publisher makes of the steps: GP01 of few changes, else GS01."""
    steps = Gs01Steps(old.view(np.uint8), new.view(np.uint8), element_bytes=old.itemsize, float_order=bool(order))
    return steps.encode() if steps.changed else None


def encode(old, new, order):
    return encode_gs01(old.view(np.uint8), new.view(np.uint8), element_bytes=old.itemsize, float_order=bool(order))


def open_payload(payload, old):
    return open_delta(
        MemoryPayload(payload), encoding="gpusync", nbytes=old.nbytes, element_bytes=old.itemsize, float_order=False
    )


def decoded(payload, old, window_bytes=1 << 20):
    new = np.full(old.nbytes, 0xA5, np.uint8)
    source, decoder = MemoryPayload(old.view(np.uint8)), open_payload(payload, old)
    for offset, _, after in would_be(source, [decoder], nbytes=old.nbytes, window_bytes=window_bytes):
        new[offset : offset + len(after)] = after
    return new.view(old.dtype)


@pytest.mark.parametrize("kind", ["steps", "any", "signs", "corners"])
@pytest.mark.parametrize("density", [None, 0.0001, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("es", WIDTHS)
def test_every_density_of_every_change(loops, es, density, kind):
    rng = np.random.default_rng(es)
    for order, count in itertools.product((0, 1), (1, 63, 1025, 30_000)):
        old, new = states(rng, count, es=es, order=order, density=density, kind=kind)
        payload = encode(old, new, order)
        if payload is None:
            np.testing.assert_array_equal(old, new)
            continue
        for window in (1 << 20, 4096, 1):
            if window > 1 or count < 100:
                np.testing.assert_array_equal(decoded(payload, old, window), new)


@pytest.mark.parametrize("count", [PIECE - 1, PIECE, PIECE + 1, PART - 1, PART, PART + 1, 4 * PART + 3])
def test_sizes_around_pieces_and_parts(loops, count):
    rng = np.random.default_rng(count)
    old, new = states(rng, count, es=2, order=1, density=0.003, kind="steps")
    new[0] ^= 1
    new[-1] ^= 1
    np.testing.assert_array_equal(decoded(encode(old, new, 1), old), new)


def test_both_loops_write_the_same_bytes():
    rng = np.random.default_rng(4)
    for es, order, kind in itertools.product(WIDTHS, (0, 1), ("steps", "any", "corners")):
        old, new = states(rng, 5000, es=es, order=order, density=0.1, kind=kind)
        made = []
        for name in ("numpy", "numba"):
            with using_host_ops(loops_of(name)):
                made.append(encode(old, new, order))
        assert made[0] == made[1]


@settings(max_examples=60)
@given(data=st.data(), es=st.sampled_from(WIDTHS), order=st.integers(0, 1))
def test_any_two_states(data, es, order):
    count = data.draw(st.integers(0, 40))
    words = st.lists(st.integers(0, (1 << 8 * es) - 1), min_size=count, max_size=count)
    old, new = (np.array(data.draw(words), f"<u{es}") for _ in range(2))
    payload = encode(old, new, order)
    if payload is None:
        np.testing.assert_array_equal(old, new)
    else:
        np.testing.assert_array_equal(decoded(payload, old, data.draw(st.integers(1, 64))), new)


def test_the_estimate_is_near():
    rng = np.random.default_rng(6)
    for density, packs in itertools.product((0.001, 0.01, 0.1, 0.5, 1.0), (True, False)):
        old, new = states(rng, 400_000, es=2, order=1, density=density, kind="steps")
        steps = Gs01Steps(old.view(np.uint8), new.view(np.uint8), element_bytes=2, float_order=True, packs=packs)
        payload = steps.encode()
        assert payload[:4] == (b"GP01" if packs and steps.changed <= 8192 else b"GS01")
        assert steps.nbytes == pytest.approx(len(payload), rel=0.06)


def test_a_tensor_of_2_to_the_31_elements():
    """Two mappings without memory behind them: a few changes, at the ends and around a part's border."""
    count = 1 << 31
    at = np.array([0, PART - 1, PART, count // 2 + 7, count - 1])
    payload = encode_gs01(Mapped(count, at[:0]), Mapped(count, at), element_bytes=1, float_order=False)
    decoder = Gs01Decoder(MemoryPayload(payload), nbytes=count, element_bytes=1)
    assert len(payload) < 1000
    decoder.check()
    assert [position for position, _, _ in read_gs01(payload, es=1, elements=count)] == at.tolist()


SOUND_OLD, SOUND_NEW = states(np.random.default_rng(4), 9000, es=2, order=1, density=0.2, kind="any")
SOUND_NEW[1::7] = from_order(to_order(SOUND_OLD[1::7], 1) + np.int16(1), 1)
SOUND = encode(SOUND_OLD, SOUND_NEW, 1)
HEAD = parse_blob(SOUND, len(SOUND))
MAIN = int(np.argmax(HEAD.blocks))  # the stream with the most index pairs
_, INDEX, UNARY, FIELDS, END = HEAD.offsets[MAIN].tolist()


def bent(at, form, change):
    """One field of the blob changed."""
    blob = bytearray(SOUND)
    struct.pack_into(form, blob, at, change(*struct.unpack_from(form, blob, at)))
    return bytes(blob)


def twice():
    """The first stream stands there once more."""
    descriptor, body = SOUND[24 + 16 * MAIN : 40 + 16 * MAIN], SOUND[HEAD.offsets[MAIN, 0] : END]
    count = len(HEAD.streams)
    start = 24 + 16 * count
    return b"".join(
        (SOUND[:16], struct.pack("<I", count + 1), SOUND[20:start], descriptor, SOUND[start:-8], body, bytes(8))
    )


def stray(at, bit):
    return bent(at, "<B", lambda byte: byte | 1 << bit)


DESCRIPTOR = 24 + 16 * MAIN
LAST_BIT = int(HEAD.streams["nbits"][MAIN]) - 1
USED = int(HEAD.streams["count"][MAIN]) * int(HEAD.streams["k"][MAIN] + HEAD.streams["v"][MAIN])
BENT = {
    "an index position is one too large": bent(INDEX + 8, "<I", lambda pos: pos + 1),
    "an index rank is one too large": bent(INDEX + 12, "<I", lambda rank: rank + 1),
    "the first index position is 1": bent(INDEX, "<I", lambda _: 1),
    "an element in two streams": twice(),
    "an element in two streams of the largest part": twice()[:6] + b"\x1f" + twice()[7:],
    "a bit behind the last field": stray(FIELDS + USED // 8, USED % 8) if USED % 32 else stray(END - 1, 7),
    "a byte behind the last stream": stray(len(SOUND) - 1, 0),
    "the first byte behind the last stream": stray(len(SOUND) - 8, 0),
    "v is 0": bent(DESCRIPTOR + 14, "<B", lambda _: 0),
    "k is 17": bent(DESCRIPTOR + 13, "<B", lambda _: 17),
    "v is 17": bent(DESCRIPTOR + 14, "<B", lambda _: 17),
    "g is the width": bent(DESCRIPTOR + 12, "<B", lambda _: 16),
    "kind is 2": bent(DESCRIPTOR + 15, "<B", lambda _: 2),
    "count is 0": bent(DESCRIPTOR, "<I", lambda _: 0),
    "count is one more": bent(DESCRIPTOR, "<I", lambda count: count + 1),
    "a bit more is counted": bent(DESCRIPTOR + 4, "<I", lambda bits: bits + 1),
    "a bit less is counted": bent(DESCRIPTOR + 4, "<I", lambda bits: bits - 1),
    "the part is behind the tensor": bent(DESCRIPTOR + 8, "<I", lambda _: 1 << 20),
    "the last unary bit is no one": bent(UNARY + LAST_BIT // 8, "<B", lambda byte: byte & ~(1 << LAST_BIT % 8)),
    "a one more among the unary bits": bent(
        UNARY, "<I", lambda word: word | (~word & 0xFFFFFFFF) & -(~word & 0xFFFFFFFF)
    ),
    "another element size": bent(4, "<B", lambda _: 4),
    "order is 2": bent(5, "<B", lambda _: 2),
    "part_log2 is 9": bent(6, "<B", lambda _: 9),
    "part_log2 is 32": bent(6, "<B", lambda _: 32),
    "part_log2 is 255": bent(6, "<B", lambda _: 255),
    "a reserved byte": bent(7, "<B", lambda _: 1),
    "an element more": bent(8, "<Q", lambda n: n + 1),
    "an element less": bent(8, "<Q", lambda n: n - 1),
    "no streams": bent(16, "<I", lambda _: 0),
    "a stream more": bent(16, "<I", lambda n: n + 1),
    "endless streams": bent(16, "<I", lambda _: (1 << 32) - 1),
    "a reserved word": bent(20, "<I", lambda _: 1),
    "eight bytes more": SOUND + bytes(8),
    "cut": SOUND[:-8],
    "cut in the head": SOUND[:30],
    "cut in the first 24 bytes": SOUND[:20],
}


def test_the_largest_parts_are_checked_too(loops):
    """In windows: nothing is held for each of their elements."""
    blob = bent(6, "<B", lambda _: 31)
    Gs01Decoder(MemoryPayload(blob), nbytes=18000, element_bytes=2).check()
    target = SOUND_OLD.copy()
    Gs01Decoder(MemoryPayload(blob), nbytes=18000, element_bytes=2).apply(target.view(np.uint8), 0)
    assert target.tolist() == SOUND_NEW.tolist()


@pytest.mark.parametrize("ahead", range(5))
def test_a_blob_is_checked_wherever_it_lies(loops, ahead):
    sound, wrong = (memoryview(bytes(ahead) + blob)[ahead:] for blob in (SOUND, BENT["an element in two streams"]))
    Gs01Decoder(MemoryPayload(sound), nbytes=18000, element_bytes=2).check()
    with pytest.raises(PayloadError, match="twice"):
        Gs01Decoder(MemoryPayload(wrong), nbytes=18000, element_bytes=2).check()


@pytest.mark.parametrize("case", BENT)
def test_every_reader_refuses_the_same(loops, told, place, case):
    blob = BENT[case]
    with pytest.raises(ValueError):
        read_gs01(blob, es=2, elements=9000)
    target = SOUND_OLD.copy().view(np.uint8)
    with pytest.raises(PayloadError) as caught:
        Gs01Decoder(MemoryPayload(blob), nbytes=18000, element_bytes=2, where=place).apply(target, 0)
    told(caught.value)
    with pytest.raises(PayloadError):
        Gs01Decoder(MemoryPayload(blob), nbytes=18000, element_bytes=2).check()
    try:
        head = parse_blob(blob, len(blob))
    except ValueError:
        return
    data = np.frombuffer(blob, np.uint8)
    assert head.elements * head.element_bytes != 18000 or not sparse_check([Payload(source=0, data=data, blob=head)])[0]


def test_a_part_has_64_streams_at_most():
    """One element a stream: as many as a part can have, and one more."""
    for count in (64, 65):
        heads = b"".join(struct.pack("<IIIBBBB", 1, position + 1, 0, 0, 0, 1, 0) for position in range(count))
        body = b""
        for position in range(count):
            unary = (1 << position).to_bytes(4 * -(-(position + 1) // 32), "little")
            stream = bytes(8) + unary + bytes(4)
            body += stream + bytes(-len(stream) % 8)
        blob = b"GS01" + struct.pack("<4BQII", 1, 0, 10, 0, 100, count, 0) + heads + body + bytes(8)
        decoder = lambda: Gs01Decoder(MemoryPayload(blob), nbytes=100, element_bytes=1)  # noqa: B023, E731
        if count == 64:
            decoder().check()
            assert read_gs01(blob, es=1, elements=100) == [(position, 1, 0) for position in range(64)]
            continue
        with pytest.raises(PayloadError):
            decoder()
        with pytest.raises(ValueError, match="streams"):
            read_gs01(blob, es=1, elements=100)


def test_windows_hold_whole_elements():
    decoder = open_payload(SOUND, SOUND_OLD)
    with pytest.raises(LayoutError, match="cuts an element"):
        decoder.apply(np.zeros(3, np.uint8), 0)


def test_memory_follows_the_window_not_the_tensor(loops):
    """A third of 8 million elements changes: a payload of about 4 MB, decoded from a source that is read."""
    rng = np.random.default_rng(8)
    old, new = states(rng, 1 << 23, es=2, order=1, density=0.3, kind="steps")
    payload = encode(old, new, 1)
    decoder, window = open_payload(payload, old), np.empty(1 << 20, np.uint8)
    decoder.apply(old.view(np.uint8)[: 1 << 20].copy(), 0)  # what numba compiles is not counted
    tracemalloc.start()
    for offset in range(1 << 20, old.nbytes, 1 << 20):
        window[:] = old.view(np.uint8)[offset : offset + (1 << 20)]
        decoder.apply(window, offset)
        np.testing.assert_array_equal(window, new.view(np.uint8)[offset : offset + (1 << 20)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.parametrize(("first", "stop", "bits"), [(0, 1, 1), (0, 2, 3), (1, 2, 2), (0, 15, 16), (14, 15, 15)])
def test_the_width_of_a_field(first, stop, bits):
    assert field_bits(first, stop) == bits


def mutate(rng, blob):
    """A bit flipped, a field set to one of its ends, a cut, a piece that stands twice, or bytes of noise."""
    blob = bytearray(blob)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(blob)))
        how = rng.integers(6)
        if how == 0 and len(blob) > 24:
            del blob[at:]
            blob += bytes(max(0, 8 - at))
        elif how == 1:
            blob[at:at] = blob[at : at + int(rng.integers(1, 40))]
        elif how == 2:
            blob[at : at + 4] = int(rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF])).to_bytes(4, "little")
        elif how == 3:
            blob[at % 56 : at % 56 + 1] = bytes([int(rng.integers(256))])
        else:
            blob[at] ^= 1 << int(rng.integers(8))
    return bytes(blob)


def fuzz(seconds, seed):
    """Mutated payloads into a window between canaries. Returns how many of each form were applied, how many refused."""
    rng = np.random.default_rng(seed)
    sound = []
    for es, order, kind in itertools.product(WIDTHS, (0, 1), ("steps", "any")):
        for density, encoder in ((0.1, encode), (0.1, encode_steps), (0.7, encode_steps)):
            old, new = states(rng, 2500, es=es, order=order, density=density, kind=kind)
            sound.append((old, encoder(old, new, order)))
    room = np.empty(2500 * 8 + 128, np.uint8)
    outcomes = dict.fromkeys(itertools.product((b"GS01", b"GP01"), (True, False)), 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        old, blob = sound[rng.integers(len(sound))]
        damaged = mutate(rng, blob)
        room[:] = 0xA5
        target = room[64 : 64 + old.nbytes]
        target[:] = old.view(np.uint8)
        checked = _is_fine(lambda: open_payload(damaged, old).check())  # noqa: B023
        applied = _is_fine(lambda: _apply(damaged, old, target))  # noqa: B023
        outcomes[blob[:4], applied] += 1
        assert (room[:64] == 0xA5).all()
        assert (room[64 + old.nbytes :] == 0xA5).all()
        if damaged[:4] in (b"GS01", b"GP01"):
            assert checked is applied is _accepts(damaged, old)
    return outcomes


def _apply(payload, old, target):
    decoder = open_payload(payload, old)
    decoder.apply(target, 0)
    decoder.finish()


def _is_fine(work):
    try:
        work()
    except (PayloadError, UnsupportedFormatError):
        return False
    return True


def _accepts(payload, old):
    try:
        blob = unpack_gp01(payload) if payload[:4] == b"GP01" else payload
        read_gs01(blob, es=old.itemsize, elements=old.size)
    except (ValueError, struct.error):
        return False
    return True


def test_damage_is_refused_or_decodes_to_something_inside(loops):
    tracemalloc.start()
    outcomes = fuzz(2.0, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(outcomes.values()) > 0
    assert peak < 16 << 20  # whatever sizes a damaged head declares


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_minute_of_damage(loops):
    outcomes = fuzz(60.0, seed=int(time.time()))
    assert min(outcomes.values()) > 20
