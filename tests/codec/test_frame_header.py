"""Frame headers by RFC 8878, with frames written byte by byte, and the walk to a frame's last byte."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusync.codec.frame_header import MAX_WINDOW_SIZE, BlockWalker, check_frame, frame_info
from gpusync.errors import PayloadError

MAGIC = bytes.fromhex("28b52ffd")


@pytest.mark.parametrize(
    ("rest", "content_size", "dict_id", "window_size", "has_checksum", "header_bytes"),
    [
        # descriptor, then window, dictionary id, content size as the descriptor says
        ("2005", 5, 0, 5, False, 6),  # single segment: size in one byte, no window byte
        ("2405", 5, 0, 5, True, 6),  # the same, with a content checksum
        ("0048", None, 0, 512 << 10, False, 6),  # window 2^19, no content size
        ("404c0001", 512, 0, 3 << 18, False, 8),  # two bytes of size are 256 more than they say; window 2^19 + 4/8
        ("604401", 256 + 0x144, 0, 256 + 0x144, False, 7),
        ("8058ffffff7f", 0x7FFFFFFF, 0, 2 << 20, False, 10),
        ("c0580000000001000000", 1 << 32, 0, 2 << 20, False, 14),
        ("210905", 5, 9, 5, False, 7),  # dictionary ids of 1, 2 and 4 bytes
        ("22090105", 5, 0x109, 5, False, 8),
        ("230901000105", 5, 0x01000109, 5, False, 10),
    ],
)
def test_header_written_by_hand(rest, content_size, dict_id, window_size, has_checksum, header_bytes):
    info = frame_info(MAGIC + bytes.fromhex(rest) + bytes(12))
    assert (info.content_size, info.dict_id, info.window_size) == (content_size, dict_id, window_size)
    assert (info.has_checksum, info.header_bytes) == (has_checksum, header_bytes)


@given(
    content=st.binary(max_size=2000),
    level=st.integers(1, 19),
    write_checksum=st.booleans(),
    write_content_size=st.booleans(),
)
def test_agrees_with_the_library(content, level, write_checksum, write_content_size):
    frame = zstandard.ZstdCompressor(
        level=level, write_checksum=write_checksum, write_content_size=write_content_size
    ).compress(content)
    info, library = frame_info(frame[:18]), zstandard.get_frame_parameters(frame)
    assert info.window_size == library.window_size
    assert info.has_checksum == library.has_checksum == write_checksum
    assert info.dict_id == library.dict_id == 0
    assert info.content_size == (len(content) if write_content_size else None)


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"", "no zstd frame"),
        (b"\x28\xb5\x2f", "no zstd frame"),
        (b"not a frame at all", "no zstd frame"),
        (bytes.fromhex("502a4d18") + bytes(14), "no zstd frame"),  # skippable
        (bytes.fromhex("27b52ffd") + bytes(14), "no zstd frame"),  # zstd 0.7
        (MAGIC, "cut"),
        (MAGIC + b"\xc0\x58" + bytes(7), "cut"),
        (MAGIC + b"\x28\x05" + bytes(12), "reserved bit"),
    ],
)
def test_no_header(head, what, place, told):
    with pytest.raises(PayloadError, match=what) as caught:
        frame_info(head, where=place)
    told(caught.value)


@pytest.mark.parametrize(
    ("rest", "what", "found"),
    [
        ("0048", "no content size", "none"),
        ("2006", "another content size", 6),
        ("2004", "another content size", 4),
        ("210105", "dictionary", 1),
        ("808905000000", "window", (1 << 27) + (1 << 24)),
    ],
)
def test_frame_that_must_not_be_decoded(rest, what, found, place, told):
    info = frame_info(MAGIC + bytes.fromhex(rest) + bytes(12))
    with pytest.raises(PayloadError, match=what) as caught:
        check_frame(info, content_size=5, where=place)
    assert caught.value.found == found
    told(caught.value)


def test_largest_window_is_accepted():
    info = frame_info(MAGIC + bytes.fromhex("808805000000") + bytes(8))
    assert info.window_size == MAX_WINDOW_SIZE
    check_frame(info, content_size=5)


@given(
    content=st.binary(max_size=400),
    write_checksum=st.booleans(),
    chunk=st.integers(1, 40),
    blocks=st.integers(1, 6),
)
def test_end_is_found_whatever_the_chunks(content, write_checksum, chunk, blocks):
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=write_checksum).compressobj(
        size=len(content) * blocks
    )
    frame = b""
    for _ in range(blocks):
        frame += compressor.compress(content) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    frame += compressor.flush()
    walker = BlockWalker(frame_info(frame[:18]))
    data = frame + b"\xff" * 100
    for offset in range(0, len(data), chunk):
        walker.feed(data[offset : offset + chunk], offset)
    assert walker.end == len(frame)


def test_rle_and_raw_blocks_by_hand():
    # content size 7: a raw block of 2, an RLE block of 4, a last raw block of 1
    frame = MAGIC + bytes.fromhex("2007" + "100000" + "6162" + "220000" + "63" + "090000" + "64")
    assert zstandard.decompress(frame) == b"abccccd"
    walker = BlockWalker(frame_info(frame[:18]))
    walker.feed(frame, 0)
    assert walker.end == len(frame)


def test_reserved_block_type():
    frame = MAGIC + bytes.fromhex("2007" + "060000")
    with pytest.raises(PayloadError, match="reserved block type"):
        BlockWalker(frame_info(frame + bytes(9))).feed(frame, 0)


def test_endless_empty_blocks_are_not_walked():
    frame = MAGIC + bytes.fromhex("2007") + bytes(3) * 3000
    with pytest.raises(PayloadError, match="more blocks"):
        BlockWalker(frame_info(frame)).feed(frame, 0)
