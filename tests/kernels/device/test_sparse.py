"""GS01 blobs on the device: apply, revert and check, against the reference and against what was encoded."""

from __future__ import annotations

import numpy as np
import pytest
from gs01_blobs import changed_words, encode_blob, encode_twice
from kernel_cases import assert_same_bytes, poisoned

from gpusync_kernels import Payload, SegmentTable, bind_sparse, parse_blob, sparse_apply, sparse_check, sparse_revert
from gpusync_kernels.sparse_check import zero_bits

pytestmark = pytest.mark.gpu

# one element, a tile of unary bits and one more, several parts of 1,024 elements; every density
SHAPES = ((1, 1.0, 10), (1024, 0.003, 10), (1025, 1.0, 22), (2100, 0.3, 10), (20_000, 0.05, 14))


def tensors(element_bytes: int):
    """`(old, new, blob)` for every shape, order and kind of change."""
    rng = np.random.default_rng(element_bytes)
    for count, density, part_log2 in SHAPES:
        for order, kind in ((0, "any"), (1, "small"), (1, "edges")):
            if count < 20_000 or kind == "small":
                old, new = changed_words(
                    rng, count, element_bytes=element_bytes, order=order, density=density, kind=kind
                )
                yield old, new, np.frombuffer(encode_blob(old, new, order=order, part_log2=part_log2), np.uint8)


def payloads_of(blobs, place):
    return [
        Payload(source=i, data=place(blob), blob=parse_blob(blob, blob.size), host=blob) for i, blob in enumerate(blobs)
    ]


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_whole_tensors_and_back(element_bytes, place):
    old, new, blobs = zip(*tensors(element_bytes), strict=True)
    every = np.arange(len(old))
    table = SegmentTable.flat(dst=every, src=every, nbytes=[words.nbytes for words in old])
    buffers, payloads = [place(words) for words in old], payloads_of(blobs, place)
    assert sparse_check(payloads).all()
    unrecorded = bind_sparse(table, dst=buffers, payloads=payloads)
    undo = place(poisoned(unrecorded.undo_bytes))
    bound = bind_sparse(table, dst=buffers, payloads=payloads, undo=undo)
    sparse_apply(bound)
    for i, words in enumerate(new):
        assert_same_bytes(buffers[i].cpu().numpy(), words, f"tensor {i} applied")
    sparse_revert(bound)
    for i, words in enumerate(old):
        assert_same_bytes(buffers[i].cpu().numpy(), words, f"tensor {i} reverted")


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_slices(element_bytes, place):
    """A [100, 90] tensor: columns in two segments of one rank, rows in another buffer; parts of 1,024 elements."""
    rows, columns, e = 60, 90, element_bytes
    rng = np.random.default_rng(20 + e)
    old, new = changed_words(rng, rows * columns, element_bytes=e, order=1, density=0.2, kind="small")
    new[::37] ^= 0x55
    blob = np.frombuffer(encode_blob(old, new, order=1, part_log2=10), np.uint8)
    strided = {"rows": rows, "src_stride": columns * e}
    table = SegmentTable.concat(
        [
            SegmentTable.strided(dst=0, dst_stride=64 * e, src_offset=7 * e, row_bytes=33 * e, **strided),
            SegmentTable.strided(dst=1, dst_stride=11 * e, src_offset=79 * e, row_bytes=11 * e, **strided),
            SegmentTable.flat(dst=2, src_offset=41 * columns * e, nbytes=13 * columns * e),
        ]
    )

    def held(words):
        grid = words.reshape(rows, columns)
        wide = np.full((rows, 64), 0x3C, words.dtype)
        wide[:, :33] = grid[:, 7:40]
        return [wide, np.ascontiguousarray(grid[:, 79:]), np.ascontiguousarray(grid[41:54])]

    buffers, payloads = [place(part) for part in held(old)], payloads_of([blob], place)
    undo = place(poisoned(payloads[0].blob.literal_bytes.sum()))
    bound = bind_sparse(table, dst=buffers, payloads=payloads, undo=undo)
    sparse_apply(bound)
    for i, part in enumerate(held(new)):
        assert_same_bytes(buffers[i].cpu().numpy(), part, f"segment {i} applied")
    sparse_revert(bound)
    for i, part in enumerate(held(old)):
        assert_same_bytes(buffers[i].cpu().numpy(), part, f"segment {i} reverted")


def test_every_width_in_one_call(place):
    """Four tensors of four element widths: four launches, one binding."""
    made = [next(iter(tensors(width))) for width in (1, 2, 4, 8)]
    old, new, blobs = zip(*made, strict=True)
    every = np.arange(4)
    table = SegmentTable.flat(dst=every, src=every, nbytes=[words.nbytes for words in old])
    buffers = [place(words) for words in old]
    sparse_apply(bind_sparse(table, dst=buffers, payloads=payloads_of(blobs, place)))
    for i, words in enumerate(new):
        assert_same_bytes(buffers[i].cpu().numpy(), words, f"tensor {i}")


def test_positions_beyond_2_to_the_32(place):
    """A tensor of 2**41 elements that nobody holds: of a slice with rows 2**30 elements apart, one meets the part."""
    part, stride = 1 << 8, 1 << 30
    base = part << 31
    rng = np.random.default_rng(30)
    old, new = changed_words(rng, 4000, element_bytes=2, order=1, density=0.5, kind="small")
    blob = bytearray(encode_blob(old, new, order=1, part_log2=31))
    blob[8:16] = (1 << 41).to_bytes(8, "little")
    parsed = parse_blob(blob, len(blob))
    for i in range(len(parsed.streams)):
        blob[24 + 16 * i + 8 : 24 + 16 * i + 12] = part.to_bytes(4, "little")
    parsed = parse_blob(blob, len(blob))
    start = base - 3 * stride + 100  # row 3 of the segment begins at element 100 of the part
    table = SegmentTable.strided(dst_stride=6000, src_offset=2 * start, src_stride=2 * stride, rows=5, row_bytes=6000)
    live = np.full((5, 3000), 0x1234, np.uint16)
    live[3] = old[100:3100]
    expected = live.copy()
    expected[3] = new[100:3100]
    for host in (None, np.frombuffer(bytes(blob), np.uint8)):
        buffer = place(live)
        payload = Payload(source=0, data=place(np.frombuffer(bytes(blob), np.uint8)), blob=parsed, host=host)
        sparse_apply(bind_sparse(table, dst=[buffer], payloads=[payload]))
        assert_same_bytes(buffer.cpu().numpy(), expected)


def stray_bits():
    """A blob with literals, one bit set where a zero must be: behind the unary bits, the fields, the literals, all."""
    old, new = changed_words(np.random.default_rng(32), 501, element_bytes=2, order=1, density=0.3, kind="any")
    sound = np.frombuffer(encode_blob(old, new, order=1, literal_from=10), np.uint8)
    head = parse_blob(sound, sound.size)
    words, masks = zero_bits(head)
    damaged = {}
    for word, mask in zip(words.tolist(), masks.tolist(), strict=True):
        for bit in (mask & -mask, 1 << mask.bit_length() - 1):  # the lowest and the highest
            blob = sound.copy()
            blob.view("<u4")[word] |= bit
            damaged[f"bit {bit:#x} of word {word}"] = blob
    assert head.streams["kind"].any()
    assert len(damaged) > 10
    return damaged


def test_check_finds_what_would_race_or_disagree(place):
    """Every blob damaged in one of its bits that the check is there for; the sound ones between them stay sound."""
    rng = np.random.default_rng(31)
    old, new = changed_words(rng, 6000, element_bytes=2, order=1, density=0.4, kind="small")
    sound = np.frombuffer(encode_blob(old, new, order=1), np.uint8)
    head = parse_blob(sound, sound.size)
    _, index, unary, fields, _ = head.offsets[0].tolist()
    damaged = {"sound": sound}
    for name, at, bit in (
        ("first position", index, 0),
        ("first rank", index + 4, 1),
        ("second position", index + 8, 2),
        ("second rank", index + 12, 0),
        ("a unary bit", unary + 20, 3),
        ("a gap", fields + 6, 0),
    ):
        blob = sound.copy()
        blob[at] ^= 1 << bit
        damaged[name] = blob
    twice = encode_twice(old, new)
    damaged["an element twice"] = np.frombuffer(twice, np.uint8)
    blob = sound.copy()
    blob[8:16] = np.frombuffer((5990).to_bytes(8, "little"), np.uint8)
    damaged["a position outside"] = blob
    damaged |= stray_bits()
    found = sparse_check(payloads_of(list(damaged.values()), place))
    expected = sparse_check(
        [Payload(source=0, data=each, blob=parse_blob(each, each.size)) for each in damaged.values()]
    )
    assert dict(zip(damaged, found.tolist(), strict=True)) == {name: name == "sound" for name in damaged}
    assert found.tolist() == expected.tolist()
