"""GS01 on the host: the reference decoder and apply against what was encoded; a head that lies is refused."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from gs01_blobs import changed_words, encode_blob
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bytes, poisoned

from gpusync_kernels import (
    Payload,
    SegmentTable,
    bind_sparse,
    decode_stream,
    head_bytes,
    parse_blob,
    parse_blobs,
    sparse_apply,
    sparse_check,
    sparse_revert,
    using_host_ops,
)
from gpusync_kernels.host_numpy import pack_fields, step_of, unpack_fields
from gpusync_kernels.word_order import from_order, to_order
from support.loops import loops_of


@st.composite
def changes(draw):
    e, order = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 1))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    count, density = draw(st.integers(1, 9000)), draw(st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]))
    kind = draw(st.sampled_from(["small", "any", "edges"]))
    old, new = changed_words(rng, count, element_bytes=e, order=order, density=density, kind=kind)
    return (
        old,
        new,
        np.frombuffer(encode_blob(old, new, order=order, part_log2=draw(st.sampled_from([10, 12, 22]))), np.uint8),
    )


def payload(blob: np.ndarray, **more) -> Payload:
    return Payload(source=0, data=blob, blob=parse_blob(blob, blob.size), **more)


@settings(max_examples=80)
@given(changes())
def test_applied_and_reverted(change):
    old, new, blob = change
    live, one = old.copy(), payload(blob)
    assert sparse_check([one]).tolist() == [True]
    table = SegmentTable.flat(nbytes=old.nbytes)
    undo = poisoned(one.blob.literal_bytes.sum())
    bound = bind_sparse(table, dst=[live], payloads=[one], undo=undo)
    sparse_apply(bound)
    assert_same_bytes(live, new, "applied")
    sparse_revert(bound)
    assert_same_bytes(live, old, "reverted")


@settings(max_examples=60)
@given(changes(), st.data())
def test_a_slice_takes_its_part(change, data):
    """Columns of the tensor seen as [rows, columns], at an odd address; nothing else in the buffer changes."""
    old, new, blob = change
    e = old.itemsize
    columns = data.draw(st.integers(1, old.size))
    rows = old.size // columns
    first = data.draw(st.integers(0, columns - 1))
    width = data.draw(st.integers(1, columns - first))
    offset = data.draw(st.integers(0, 3))
    table = SegmentTable.strided(
        dst_offset=offset,
        dst_stride=(width + 1) * e,
        src_offset=first * e,
        src_stride=columns * e,
        rows=rows,
        row_bytes=width * e,
    )

    def held(words):
        grid = np.full((rows, width + 1), 0x77, words.dtype)
        grid[:, :width] = words[: rows * columns].reshape(rows, columns)[:, first : first + width]
        return np.concatenate([np.full(offset, 9, np.uint8), grid.reshape(-1).view(np.uint8)])

    live = held(old)
    sparse_apply(bind_sparse(table, dst=[live], payloads=[payload(blob)]))
    assert_same_bytes(live, held(new))


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@settings(max_examples=60)
@given(change=changes(), data=st.data())
def test_a_run_takes_its_part_and_gives_it_back(loops, change, data):
    """Elements [first, stop) between guards: streams begin before it, end behind it, or lie inside."""
    old, new, blob = change
    first, stop = sorted(data.draw(st.lists(st.integers(0, old.size), min_size=2, max_size=2)))
    guard = np.full(8, 0x5A, np.uint8)
    held = [np.concatenate([guard, words[first:stop].view(np.uint8), guard]) for words in (old, new)]
    table = SegmentTable.flat(dst_offset=8, src_offset=first * old.itemsize, nbytes=(stop - first) * old.itemsize)
    live, one = held[0].copy(), payload(blob)
    undo = poisoned(one.blob.literal_bytes.sum())
    bound = bind_sparse(table, dst=[live], payloads=[one], undo=undo)
    with using_host_ops(loops_of(loops)):
        sparse_apply(bound)
        assert_same_bytes(live, held[1], "applied")
        sparse_revert(bound)
    assert_same_bytes(live, held[0], "reverted")


@settings(max_examples=30)
@given(changes(), st.data())
def test_blocks_decode_alone(change, data):
    _, _, blob = change
    parsed = parse_blob(blob, blob.size)
    stream = data.draw(st.integers(0, len(parsed.streams) - 1))
    cuts = sorted({0, int(parsed.blocks[stream]), data.draw(st.integers(0, int(parsed.blocks[stream])))})
    parts = [decode_stream(blob, parsed, stream, a, b) for a, b in itertools.pairwise(cuts)]
    positions, values, _ = decode_stream(blob, parsed, stream)
    assert np.concatenate([part[0] for part in parts]).tolist() == positions.tolist()
    assert np.concatenate([part[1] for part in parts]).tolist() == values.tolist()
    assert [part[2] for part in parts] == np.cumsum([0, *(len(part[0]) for part in parts[:-1])]).tolist()


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@settings(max_examples=150)
@given(change=changes(), data=st.data())
def test_a_damaged_blob_changes_nothing_outside(loops, change, data):
    """Any bits flipped: refused, or found by the check, or applied inside the slice alone; numpy would raise beyond
    it.
    """
    old, _, blob = change
    blob = blob.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, blob.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        one = payload(blob)
    except ValueError as error:
        assert "not a GS01 blob" in str(error)  # noqa: PT017
        return
    if one.blob.element_bytes != old.itemsize or one.blob.elements > 1 << 20:
        return
    first, stop = sorted(data.draw(st.lists(st.integers(0, old.size), min_size=2, max_size=2)))
    held = old[first:stop].view(np.uint8)
    room = np.full(held.size + 64, 0xA5, np.uint8)
    room[32:-32] = held
    table = SegmentTable.flat(dst_offset=32, src_offset=first * old.itemsize, nbytes=held.size)
    sound = sparse_check([one])[0]
    bound = bind_sparse(table, dst=[room], payloads=[one], undo=poisoned(one.blob.literal_bytes.sum()))
    with using_host_ops(loops_of(loops)):
        sparse_apply(bound)
    assert (room[:32] == 0xA5).all()
    assert (room[-32:] == 0xA5).all()
    if sound:
        sparse_revert(bound)
        assert_same_bytes(room[32:-32], held, "a sound blob is undone, whatever it changed")


def test_the_step_of_the_docstring():
    assert step_of(np.array([5], np.uint32), 4, 2).tolist() == [-6]
    words = np.array([0x0001, 0x0000, 0x8000, 0x8001], np.uint16)
    assert to_order(words, 1).tolist() == [1, 0, -1, -2]
    assert from_order(to_order(words, 1), 1).tolist() == words.tolist()


@pytest.mark.parametrize("width", [1, 5, 16, 31, 32])
@pytest.mark.parametrize(("first", "count"), [(0, 100), (1, 31), (40, 60), (99, 1), (7, 0)])
def test_fields_are_unpacked_from_anywhere(width, first, count):
    values = np.random.default_rng(width).integers(0, 1 << width, 100, dtype=np.uint64)
    number = sum(int(value) << (i * width) for i, value in enumerate(values))
    packed = np.frombuffer(number.to_bytes(-(-100 * width // 32) * 4, "little"), np.uint8)
    assert unpack_fields(packed, width, first, count).tolist() == values[first : first + count].tolist()


def test_the_head_is_enough():
    old, new = changed_words(np.random.default_rng(0), 3000, element_bytes=2, order=1, density=0.1, kind="any")
    blob = encode_blob(old, new, order=1, part_log2=10)
    size = head_bytes(blob[:24])
    assert size < len(blob)
    assert parse_blob(blob[:size], len(blob)).offsets.tolist() == parse_blob(blob, len(blob)).offsets.tolist()


def test_blobs_are_parsed_together_as_alone():
    rng = np.random.default_rng(1)
    blobs = []
    for element_bytes, order, size, density in [
        (2, 1, 3000, 0.1),
        (4, 0, 5, 1.0),
        (1, 0, 9000, 0.01),
        (8, 1, 1100, 0.5),
    ]:
        words = changed_words(rng, size, element_bytes=element_bytes, order=order, density=density, kind="any")
        blobs.append(encode_blob(*words, order=order, part_log2=10))
    together = parse_blobs([(blob[: head_bytes(blob[:24])], len(blob)) for blob in blobs])
    assert parse_blobs([]) == []
    for blob, found in zip(blobs, together, strict=True):
        alone = parse_blob(blob, len(blob))
        for name in ("element_bytes", "order", "part_log2", "elements", "nbytes"):
            assert getattr(found, name) == getattr(alone, name)
        for name in ("streams", "base", "span", "offsets", "blocks", "literal_bytes"):
            assert getattr(found, name).tolist() == getattr(alone, name).tolist()
    assert max(len(found.streams) for found in together) > 1


def test_of_blobs_parsed_together_the_wrong_stream_is_told_by_its_number_in_its_blob():
    sound = encode_blob(np.zeros(50, np.uint16), np.ones(50, np.uint16), order=0)
    wrong = bytearray(sound)
    wrong[37] = 17
    with pytest.raises(ValueError, match="stream 0: k or v"):
        parse_blobs([(sound, len(sound)), (wrong, len(wrong)), (sound, len(sound))])
    with pytest.raises(ValueError, match="bytes, expected"):
        parse_blobs([(sound, len(sound)), (sound, len(sound) + 8), (sound, len(sound))])


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GS02", "magic"),
        (4, b"\x03", "element size 3"),
        (5, b"\x02", "order 2"),
        (6, b"\x09", "part size"),
        (7, b"\x01", "reserved"),
        (8, struct.pack("<Q", 1 << 60), "elements"),
        (16, struct.pack("<I", 0), "0 streams"),
        (16, struct.pack("<I", 1 << 31), "streams do not fit"),
        (20, b"\x01", "reserved"),
        (24, struct.pack("<I", 0), "stream 0: count"),
        (28, struct.pack("<I", 1 << 31), "stream 0: bit count"),
        (32, struct.pack("<I", 9), "stream 0: part"),
        (36, b"\x10", "stream 0: g"),
        (37, b"\x11", "stream 0: k or v"),
        (38, b"\x00", "stream 0: v or g"),
        (39, b"\x02", "stream 0: unknown kind"),
        (39, b"\x01", "stream 0: v or g"),
        (28, struct.pack("<I", 100), "bytes, expected"),
    ],
)
def test_a_head_that_lies_is_refused(at, value, message):
    blob = bytearray(encode_blob(np.zeros(50, np.uint16), np.ones(50, np.uint16), order=0))
    blob[at : at + len(value)] = value
    with pytest.raises(ValueError, match=f"not a GS01 blob: .*{message}"):
        parse_blob(blob, len(blob))


@pytest.mark.parametrize("length", [0, 23, 31, 40, 47])
def test_a_cut_blob_is_refused(length):
    blob = encode_blob(np.zeros(50, np.uint16), np.ones(50, np.uint16), order=0)
    with pytest.raises(ValueError, match="not a GS01 blob"):
        parse_blob(blob[:length], length)


def test_what_does_not_fit_is_refused():
    old, new = np.zeros(50, np.uint16), np.full(50, 0x4000, np.uint16)
    one = payload(np.frombuffer(encode_blob(old, new, order=0, literal_from=5), np.uint8))
    table = SegmentTable.flat(nbytes=100)
    with pytest.raises(ValueError, match="undo record has 8 bytes, expected 104"):
        bind_sparse(table, dst=[old], payloads=[one], undo=np.zeros(8, np.uint8))
    bound = bind_sparse(table, dst=[old], payloads=[one])
    sparse_apply(bound)
    with pytest.raises(ValueError, match="without an undo record"):
        sparse_revert(bound)
    with pytest.raises(ValueError, match="its head says"):
        sparse_check([Payload(source=0, data=one.data[:-8], blob=one.blob)])


@pytest.mark.parametrize("width", range(1, 33))
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100])
def test_fields_are_packed_as_they_are_unpacked(width, count):
    values = np.random.default_rng(width).integers(0, 1 << width, count, dtype=np.uint64)
    number = sum(int(value) << (i * width) for i, value in enumerate(values))
    assert pack_fields(values.astype(np.uint32), width).tobytes() == number.to_bytes(
        -(-count * width // 32) * 4, "little"
    )


@pytest.mark.parametrize("loops", ["numpy", "numba"])
def test_finding_stops_at_most(loops):
    """More changes than are wanted: none are given, however they lie."""
    for changed in (slice(0, 100), slice(0, 6400, 64)):
        old = np.zeros(6404, np.uint16)
        new = old.copy()
        new[changed] = 3
        sides = old.view(np.uint8), new.view(np.uint8)
        find = loops_of(loops).find_steps
        assert find(*sides, element_bytes=2, order=1, most=99) is None
        positions, steps = find(*sides, element_bytes=2, order=1, most=100)
        assert positions.tolist() == np.flatnonzero(new).tolist()
        assert steps.tolist() == [3] * 100


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@given(first=st.sets(st.integers(0, 99)), second=st.sets(st.integers(0, 99)))
def test_marks(loops, first, second):
    """Those of two streams of one part: set, and told where they meet."""
    marks = np.zeros(13, np.uint8)
    assert loops_of(loops).set_marks(marks, np.array(sorted(first), np.int64)) is False
    met = loops_of(loops).set_marks(marks, np.array(sorted(second), np.int64))
    assert met == bool(first & second)
    assert np.flatnonzero(np.unpackbits(marks, bitorder="little")).tolist() == sorted(first | second)


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@pytest.mark.parametrize("cuts", [[0, 4096], [0, 100, 4096]])
def test_the_largest_step_of_eight_bytes(loops, cuts):
    """2**63, which no encoder of ours makes a step of; over whole parts, and over segments that cut one."""
    head = struct.pack("<4sBBBBQII", b"GS01", 8, 0, 12, 0, 4096, 1, 0) + struct.pack("<IIIBBBB", 1, 1, 0, 63, 0, 1, 0)
    blob = np.frombuffer(head + struct.pack("<IIII", 0, 0, 1, 0) + bytes(8), np.uint8)
    old = np.arange(4096, dtype=np.uint64)
    live, edges = old.copy(), 8 * np.array(cuts)
    table = SegmentTable.flat(dst_offset=edges[:-1], src_offset=edges[:-1], nbytes=np.diff(edges))
    bound = bind_sparse(table, dst=[live], payloads=[payload(blob)])
    with using_host_ops(loops_of(loops)):
        sparse_apply(bound)
        assert live.tolist() == [1 << 63, *range(1, 4096)]
        sparse_revert(bound)
    assert live.tolist() == old.tolist()
