"""GP01 payloads: the GS01 blob of the same streams, byte for byte, in fewer bytes; and refused for every wrong one."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc

import numpy as np
import pytest
from codec.test_gs01 import PART, PIECE, WIDTHS, Mapped, decoded, encode_steps, open_payload, states
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.codec import Gs01Steps, MemoryPayload, encode_gs01, gs01_encode, open_delta
from gpusync.codec.describe import PayloadSummary, summarise_payload
from gpusync.codec.gs01_packed import MAX_PACKED_BYTES, MAX_PACKED_CHANGES, expand
from gpusync.errors import PayloadError
from gpusync_kernels import parse_blob
from support.gp01 import unpack_gp01
from support.gs01 import decode_gs01, read_gs01


def expanded(payload, old):
    return expand(MemoryPayload(payload), nbytes=old.nbytes, element_bytes=old.itemsize)


def check(payload, old, new):
    """It decodes to the new words, and expands to what another reader unpacks."""
    assert payload[:4] == b"GP01"
    assert expanded(payload, old) == unpack_gp01(payload)
    open_payload(payload, old).check()
    np.testing.assert_array_equal(decoded(payload, old), new)


@pytest.mark.parametrize("kind", ["steps", "any", "signs", "corners"])
@pytest.mark.parametrize("density", [None, 0.0001, 0.01, 0.25])
@pytest.mark.parametrize("es", WIDTHS)
def test_every_density_of_every_change(loops, es, density, kind):
    rng = np.random.default_rng(es)
    for order, count in itertools.product((0, 1), (1, 63, 1025, 30_000)):
        old, new = states(rng, count, es=es, order=order, density=density, kind=kind)
        payload = encode_steps(old, new, order)
        if payload is None:
            np.testing.assert_array_equal(old, new)
        else:
            check(payload, old, new)


@settings(max_examples=60)
@given(data=st.data(), es=st.sampled_from(WIDTHS), order=st.integers(0, 1))
def test_any_two_states(data, es, order):
    count = data.draw(st.integers(1, 40))
    words = st.lists(st.integers(0, (1 << 8 * es) - 1), min_size=count, max_size=count)
    old, new = (np.array(data.draw(words), f"<u{es}") for _ in range(2))
    payload = encode_steps(old, new, order)
    if payload is None:
        np.testing.assert_array_equal(old, new)
    else:
        check(payload, old, new)


@pytest.mark.parametrize("density", [0.0003, 0.006])
def test_it_is_the_blob_of_the_same_streams(loops, monkeypatch, density):
    """Two parts of a tensor, steps and literals, streams of more than 1,024 unary bits: byte for byte."""
    monkeypatch.setattr(gs01_encode, "PART_LOG2", (20,))
    rng = np.random.default_rng(5)
    old, new = states(rng, PIECE + 70_000, es=4, order=1, density=density, kind="steps")
    some = rng.integers(0, old.size, 40)
    new[some] = rng.integers(0, 1 << 32, len(some), dtype=np.uint32)
    payload = encode_steps(old, new, 1)
    monkeypatch.setattr(gs01_encode, "pack", gs01_encode.write_blob)
    blob = encode_steps(old, new, 1)
    head = parse_blob(blob, len(blob))
    assert (payload[:4], head.part_log2) == (b"GP01", 20)
    assert {*head.streams["part"].tolist()} == {*head.streams["kind"].tolist()} == {0, 1}
    assert (head.streams["nbits"].max() > 1024) == (density == 0.006)
    assert expanded(payload, old) == blob
    np.testing.assert_array_equal(decode_gs01(blob, old.view(np.uint8), "F32"), new.view(np.uint8))


def test_what_has_more_changes_is_gs01():
    old = np.zeros(40_000, np.uint16)
    for changes, magic in ((MAX_PACKED_CHANGES, b"GP01"), (MAX_PACKED_CHANGES + 1, b"GS01")):
        new = old.copy()
        new[: 4 * changes : 4] = 1
        payload = encode_steps(old, new, 0)
        assert payload[:4] == magic
        np.testing.assert_array_equal(decoded(payload, old), new)


@pytest.mark.parametrize("count", [PIECE - 1, PIECE, PIECE + 1, PART - 1, PART, PART + 1, 4 * PART + 3])
def test_sizes_around_pieces_and_parts(count):
    old, new = states(np.random.default_rng(count), count, es=2, order=1, density=0.0001, kind="steps")
    new[[0, count // 2, -1]] ^= 1
    check(encode_steps(old, new, 1), old, new)


def test_changes_at_both_ends_of_every_part(monkeypatch):
    monkeypatch.setattr(gs01_encode, "PART_LOG2", (20,))
    old = np.zeros(5 * PIECE + 9, np.uint8)
    new = old.copy()
    new[::PIECE] = new[PIECE - 1 :: PIECE] = new[-1] = 1
    payload = encode_steps(old, new, 0)
    check(payload, old, new)
    assert payload[4] >> 3 == 20 - 10


def test_a_tensor_of_2_to_the_31_elements():
    count = 1 << 31
    at = np.array([0, PART - 1, PART, count // 2 + 7, count - 1])
    steps = Gs01Steps(Mapped(count, at[:0]), Mapped(count, at), element_bytes=1, float_order=False)
    payload = steps.encode()
    assert len(payload) < 300
    decoder = open_delta(
        MemoryPayload(payload), encoding="gpusync", nbytes=count, element_bytes=1, float_order=False
    )  # fmt: skip
    decoder.check()
    assert [position for position, _, _ in read_gs01(unpack_gp01(payload), es=1, elements=count)] == at.tolist()


def test_it_is_never_larger_than_gs01():
    rng = np.random.default_rng(7)
    for es, density, kind in itertools.product(WIDTHS, (None, 0.001, 0.05), ("steps", "any")):
        old, new = states(rng, 20_000, es=es, order=1, density=density, kind=kind)
        plain = encode_gs01(old.view(np.uint8), new.view(np.uint8), element_bytes=es, float_order=True)
        assert len(encode_steps(old, new, 1)) <= len(plain) - 32


def test_one_change_takes_16_bytes():
    old = np.zeros(384, np.uint16)
    new = old.copy()
    new[300] = 1
    assert len(encode_steps(old, new, 1)) == 16


def leb(value):
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def unary(*ones):
    return sum(1 << one for one in ones).to_bytes(ones[-1] // 8 + 1, "little")


FIVE = {
    "part": 0, "count": 5, "zeros": 4, "g": 0, "k": 3, "v": 1, "unary": unary(0, 4, 5, 7, 8), "fields": b"\x21\x43\x05"
}  # fmt: skip


def made(*streams, form=1 | 1 << 2 | 12 << 3, n=9000, count=None):
    """A payload for a tensor of 9,000 bf16, stream by stream; of a sound one five elements change."""
    streams = [{**FIVE, **stream} for stream in streams or ({},)]
    heads = b"".join(
        b"".join(
            each[name] if isinstance(each[name], bytes) else leb(each[name]) for name in ("part", "count", "zeros")
        )
        + bytes([each["g"], each["k"], each["v"]])
        for each in streams
    )
    bodies = b"".join(each.get("words", b"") + each["unary"] + each["fields"] for each in streams)
    numbers = [each if isinstance(each, bytes) else leb(each) for each in (n, len(streams) if count is None else count)]
    return b"GP01" + bytes([form]) + b"".join(numbers) + heads + bodies


OLD = np.arange(9000, dtype=np.uint16)
SOUND = made()
WORDS = {"g": 128, "v": 0, "count": 2, "zeros": 0, "unary": b"\x03", "fields": b"\x09", "words": bytes(4)}
BENT = {
    "another element size": (made(form=SOUND[4] ^ 3), "element size"),
    "parts of 2**32 elements": (made(form=SOUND[4] & 7 | 22 << 3), "part size"),
    "an element more": (made(n=9001), "another tensor"),
    "an element less": (made(n=8999), "another tensor"),
    "2**63 - 1 elements": (made(n=(1 << 63) - 1), "another tensor"),
    "2**63 elements": (made(n=1 << 63), "wrong number"),
    "a number of ten bytes": (made(n=b"\xa8\xc6" + b"\x80" * 7 + b"\x01"), "wrong number"),
    "a number with a byte too many": (made(n=b"\xa8\xc6\x00"), "wrong number"),
    "a zero of two bytes": (made({"part": b"\x80\x00"}), "wrong number"),
    "no streams": (made(count=0), "number of streams"),
    "more streams than changes": (made(count=MAX_PACKED_CHANGES + 1), "number of streams"),
    "a stream more": (made(count=2), "wrong length|cut|wrong part"),
    "a stream less": (made({}, {"part": 0}, count=1), "wrong length"),
    "a part behind the tensor": (made({"part": 1}), "wrong part"),
    "a part of 2**62": (made({"part": 1 << 62}), "wrong part"),
    "k is 17": (made({"k": 17, "fields": bytes(12)}), "k or v"),
    "v is 17": (made({"v": 17, "fields": bytes(13)}), "k or v"),
    "v is 0": (made({"v": 0, "fields": b"\x21\x43"}), "v or g"),
    "g is the width": (made({"g": 16}), "g out of range"),
    "count is 0": (made({"count": 0, "zeros": 9, "fields": b""}), "count out of range"),
    "more changes than there may be": (made({"count": MAX_PACKED_CHANGES + 1}), "number of changes"),
    "more changes together": (made(*[{"count": MAX_PACKED_CHANGES // 2}] * 2, {"count": 1}), "number of changes"),
    "2**62 changes": (made({"count": 1 << 62}), "number of changes"),
    "2**62 zeros": (made({"zeros": 1 << 62}), "wrong length"),
    "more zeros than the part has room for": (made({"zeros": 2000, "unary": bytes(250) + b"\x1f"}), "bit count"),
    "positions beyond 2**32": (
        made({"k": 16, "v": 16, "zeros": 70_000, "unary": unary(0, 1, 2, 3, 70_004), "fields": bytes(20)}),
        "bit count",
    ),
    "a change less than there are ones": (made({"count": 4, "zeros": 5, "fields": b"\x21\x43"}), "number of ones"),
    "a change more than there are ones": (made({"count": 6, "zeros": 3, "fields": b"\x21\x43\x05"}), "number of ones"),
    "the last bit is no one": (made({"zeros": 5}), "last unary bit"),
    "a bit behind the last one": (made({"unary": unary(0, 4, 5, 7, 8, 9)}), "padding"),
    "a bit behind the last field": (made({"fields": b"\x21\x43\x15"}), "padding"),
    "an element in two streams": (made({}, {}), "change an element twice"),
    "an element as step and literal": (made({}, WORDS), "change an element twice"),
    "a literal with v": (made(WORDS | {"v": 1}), "v or g"),
    "a literal with g": (made(WORDS | {"g": 129}), "v or g"),
    "a literal without its words": (made(WORDS | {"words": b""}), "wrong length"),
    "a position behind the part": (made({"zeros": 1125, "unary": unary(0, 1, 2, 3, 1129)}), "position"),
    "a byte more": (SOUND + b"\0", "wrong length"),
    "a byte less": (SOUND[:-1], "wrong length"),
    "longer than it may be": (SOUND + bytes(MAX_PACKED_BYTES), "too long"),
    "nothing behind the magic": (b"GP01", "cut"),
    "cut in the head": (SOUND[:6], "cut"),
    "cut in a descriptor": (SOUND[:11], "cut"),
}


@pytest.mark.parametrize(
    "payload",
    [SOUND, made(WORDS), made({}, {"count": 2, "zeros": 1100, "unary": unary(1100, 1101), "fields": b"\x21"})],
    ids=["steps", "literals", "two streams"],
)
def test_what_the_cases_are_made_of_is_sound(payload):
    new = decode_gs01(unpack_gp01(payload), OLD.view(np.uint8), "BF16").view("<u2")
    assert (new != OLD).any()
    check(payload, OLD, new)


@pytest.mark.parametrize("case", BENT)
def test_it_is_refused(loops, told, place, case):
    payload, says = BENT[case]
    with pytest.raises(PayloadError, match=says) as caught:
        open_delta(
            MemoryPayload(payload), encoding="gpusync", nbytes=OLD.nbytes, element_bytes=2, float_order=True,
            where=place,
        ).check()  # fmt: skip
    told(caught.value)
    with pytest.raises(PayloadError):
        open_payload(payload, OLD).apply(OLD.copy().view(np.uint8), 0)
    with pytest.raises(ValueError):
        read_gs01(unpack_gp01(payload), es=2, elements=OLD.size)


@pytest.mark.parametrize(
    "payload",
    [
        made(n=(1 << 63) - 1),
        made(count=MAX_PACKED_CHANGES),
        made({"count": MAX_PACKED_CHANGES, "zeros": 0}),
        made({"zeros": 1 << 62}),
        made({"zeros": (1 << 32) - 1, "k": 16, "v": 16}),
        made({"part": (1 << 32) - 1}, n=9000),
    ],
    ids=["elements", "streams", "changes", "zeros", "bits", "part"],
)
def test_what_is_claimed_is_not_allocated(payload):
    for read in (
        lambda: open_payload(payload, OLD),
        lambda: summarise_payload(MemoryPayload(payload), encoding="gpusync"),
    ):
        tracemalloc.start()
        with contextlib.suppress(PayloadError):
            read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 10


def test_the_largest_expands_to_less_than_one_and_a_half_mib():
    """As many streams as there may be, of a literal byte each, and then zeros up to the last byte."""
    one = {"g": 128, "k": 0, "v": 0, "count": 1, "zeros": 0, "unary": b"\1", "fields": b"", "words": b"\7"}
    streams = [one | {"part": int(number > 0)} for number in range(MAX_PACKED_CHANGES)]
    room = MAX_PACKED_BYTES - len(made(*streams, form=0, n=1 << 31)) - 3
    streams[-1] |= {"zeros": 8 * room - 1, "unary": bytes(room - 1) + b"\x80"}
    payload = made(*streams, form=0, n=1 << 31)
    assert MAX_PACKED_BYTES - 4 <= len(payload) <= MAX_PACKED_BYTES
    blob = expand(MemoryPayload(payload), nbytes=1 << 31, element_bytes=1)
    assert len(payload) < len(blob) < 3 << 19


def test_a_cut_anywhere_is_refused():
    old, new = states(np.random.default_rng(3), 4000, es=2, order=1, density=0.02, kind="any")
    payload = encode_steps(old, new, 1)
    for size in range(len(payload)):
        with pytest.raises(PayloadError):
            open_payload(payload[:size], old)
        with pytest.raises(ValueError):
            unpack_gp01(payload[:size])


@pytest.mark.parametrize("kind", ["steps", "any"])
def test_every_flipped_bit_is_refused_or_decodes_to_something_inside(kind):
    """As by the other reader. 2,100 unary bits: there are index pairs to be made."""
    rng = np.random.default_rng(11)
    old, new = states(rng, 2500, es=1, order=1, density=0.9 if kind == "steps" else 0.05, kind=kind)
    payload = encode_steps(old, new, 1)
    flips = rng.permutation(8 * len(payload))[:600] if kind == "steps" else range(8 * len(payload))
    applied = 0
    for bit in [*range(8 * 24), *flips]:
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        if damaged[:4] != b"GP01":
            continue
        room = np.full(old.nbytes + 128, 0xA5, np.uint8)
        target = room[64:-64]
        target[:] = old
        try:
            open_payload(damaged, old).check()
            open_payload(damaged, old).apply(target, 0)
        except PayloadError:
            with pytest.raises(ValueError):
                read_gs01(unpack_gp01(bytes(damaged)), es=1, elements=old.size)
        else:
            applied += 1
            np.testing.assert_array_equal(decode_gs01(unpack_gp01(bytes(damaged)), old, "F8_E4M3"), target)
        assert (room[:64] == 0xA5).all()
        assert (room[-64:] == 0xA5).all()
    assert applied > 50


def test_what_it_says_of_itself(told, place):
    summary = summarise_payload(MemoryPayload(made({}, WORDS)), encoding="gpusync")
    assert summary == PayloadSummary(form="GP01", tensor_bytes=18000, bytes_changed=2 * 7)
    for case in ("no streams", "2**62 changes", "a byte less", "longer than it may be", "cut in the head"):
        with pytest.raises(PayloadError) as caught:
            summarise_payload(MemoryPayload(BENT[case][0]), encoding="gpusync", where=place)
        told(caught.value)
