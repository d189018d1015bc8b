"""Shard headers: bombs, ranges that overlap, leave gaps or lead out, types that only look right."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gpusync.errors import HeaderError, VersionMissingError
from gpusync.stream import read_version

Refused = Callable[..., Exception]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CHECKSUM = "0123456789abcdef" * 2


@pytest.mark.parametrize("length", [100_000_001, 2**31, 2**62, 2**63, 2**64 - 1])
def test_header_length_over_the_limit(draft, refused: Refused, length: int) -> None:
    """Never right, so an error at once, however long the file may become."""
    draft.lengths[FIRST] = length
    refused(HeaderError, path=draft.directory / FIRST, found=length)


@pytest.mark.parametrize("length", [10_000, 100_000_000])
def test_header_length_past_the_end_may_still_come(draft, refused: Refused, length: int) -> None:
    draft.lengths[FIRST] = length
    path = draft.write().directory / FIRST
    refused(VersionMissingError, path=path, expected=8 + length, found=path.stat().st_size)


@pytest.mark.parametrize("length", [0, 1, 40])
def test_header_length_that_cuts_the_text(draft, refused: Refused, length: int) -> None:
    draft.lengths[FIRST] = length
    refused(HeaderError, path=draft.directory / FIRST)


def test_header_of_brackets_is_counted_before_it_is_parsed(draft, refused: Refused) -> None:
    """Each pair of brackets would become a list of 56 bytes: 3 MB of text, 75 MB of memory."""
    draft.headers[FIRST] = b'{"a":[' + b"[]," * 999_999 + b"[]]}"
    draft.write()
    tracemalloc.start()
    refused(HeaderError, write=False, path=draft.directory / FIRST, expected="at most 2000000")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000], ids=["lists", "objects"])
def test_deep_nesting(draft, refused: Refused, text: bytes) -> None:
    draft.headers[FIRST] = b'{"a":' + text
    refused(HeaderError, path=draft.directory / FIRST, text="too deeply")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b" {}",
        b"\xef\xbb\xbf{}",
        b"{",
        b"{}{}",
        b"{}\0",
        b'{"a":\xff}',
        b'{"a":1,}',
        "{}".encode("utf-16"),
        b"{'a':1}",
        b"{" + b"\0" * 64,
    ],
)
def test_header_that_is_no_json_object(draft, refused: Refused, text: bytes) -> None:
    draft.headers[FIRST] = text
    refused(HeaderError, path=draft.directory / FIRST)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000])
def test_numbers_that_json_or_this_reader_does_not_have(draft, refused: Refused, number: bytes) -> None:
    entry = b'{"dtype":"U8","shape":[' + number + b'],"data_offsets":[0,33]}'
    draft.headers[FIRST] = b'{"a.weight":' + entry + b"}"
    refused(HeaderError, path=draft.directory / FIRST)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [20], "data_offsets": [0, 20], **changes}


@pytest.mark.parametrize(
    "spoilt",
    [
        None,
        [],
        "U8",
        {},
        {"shape": [20], "data_offsets": [0, 20]},
        {"dtype": "U8", "data_offsets": [0, 20]},
        {"dtype": "U8", "shape": [20]},
        entry(dtype=None),
        entry(dtype=8),
        entry(dtype="u8"),
        entry(dtype=""),
        entry(dtype="X" * 33),
        entry(dtype="U8\n"),
        entry(shape=20),
        entry(shape=[20.0]),
        entry(shape=["20"]),
        entry(shape=[True] * 20),
        entry(shape=[-20]),
        entry(shape=[-4, -5]),
        entry(shape=[2**63]),
        entry(shape=[1] * 64 + [20]),
        entry(shape=[2**62] * 64),
        entry(shape=[0, 2**62]),
        entry(shape=[21]),
        entry(dtype="BF16"),
        entry(dtype="F4"),
        entry(dtype="F6_E2M3"),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, 20, 20]),
        entry(data_offsets=[20, 0]),
        entry(data_offsets=[-5, 15]),
        entry(data_offsets=[0.0, 20.0]),
        entry(data_offsets=[False, 20]),
        entry(data_offsets=["0", "20"]),
        entry(data_offsets={"0": 0, "20": 20}),
        entry(data_offsets=[0, 2**64]),
        entry(dtype="FUTURE", data_offsets=[20, 0]),
    ],
)
def test_tensor_entry_that_is_malformed(draft, refused: Refused, spoilt: object) -> None:
    draft.headers[FIRST]["a.weight"] = spoilt
    refused(HeaderError, path=draft.directory / FIRST, tensor="a.weight")


@pytest.mark.parametrize("metadata", [None, [], "x", 1, {"a.weight": 1}, {"a.weight": None}, {"a.weight": [CHECKSUM]}])
def test_metadata_that_is_no_object_of_texts(draft, refused: Refused, metadata: object) -> None:
    draft.headers[FIRST]["__metadata__"] = metadata
    refused(HeaderError, path=draft.directory / FIRST, text="__metadata__")


@pytest.mark.parametrize(
    ("ranges", "tensor", "text"),
    [
        ([(0, 20), (23, 33)], "b.weight", "gap"),
        ([(3, 20), (20, 33)], "a.weight", "gap"),
        ([(0, 20), (19, 33)], "b.weight", "overlap"),
        ([(0, 33), (20, 33)], "b.weight", "overlap"),
        ([(0, 33), (0, 33)], "b.weight", "overlap"),
        ([(13, 33), (0, 14)], "a.weight", "overlap"),
        ([(0, 33), (5, 5)], "b.weight", "overlap"),
        ([(0, 33), (40, 40)], "b.weight", "gap"),
    ],
)
def test_ranges_that_do_not_tile_the_file(draft, refused: Refused, ranges, tensor: str, text: str) -> None:
    for name, (begin, end) in zip(("a.weight", "b.weight"), ranges, strict=True):
        draft.headers[FIRST][name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    refused(HeaderError, path=draft.directory / FIRST, tensor=tensor, text=text)


@pytest.mark.parametrize(
    "ranges", [[(13, 33), (0, 13)], [(0, 33), (33, 33)], [(33, 33), (0, 33)], [(0, 0), (0, 33)], [(0, 33), (0, 0)]]
)
def test_ranges_may_stand_in_any_order_and_be_empty(draft, ranges) -> None:
    for name, (begin, end) in zip(("a.weight", "b.weight"), ranges, strict=True):
        draft.headers[FIRST][name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    draft.write()
    tensors = read_version(draft.source_dir, 1).tensors
    start = 8 + len((draft.directory / FIRST).read_bytes()) - 8 - 33
    assert [(tensors[n].offset - start, tensors[n].nbytes) for n in ("a.weight", "b.weight")] == [
        (begin, end - begin) for begin, end in ranges
    ]


@pytest.mark.parametrize("extra", [1, 100])
def test_bytes_after_the_last_tensor(draft, refused: Refused, extra: int) -> None:
    draft.data[FIRST] += bytes(extra)
    size = (draft.write().directory / FIRST).stat().st_size
    refused(HeaderError, path=draft.directory / FIRST, expected=size - extra, found=size)


def test_name_twice_in_a_header(draft, refused: Refused) -> None:
    """Which of the two counts would depend on the reader."""
    one = b'"a.weight":{"dtype":"U8","shape":[33],"data_offsets":[0,33]}'
    draft.headers[FIRST] = b"{" + one + b"," + one + b"}"
    refused(HeaderError, path=draft.directory / FIRST, found="a.weight", text="twice")


@pytest.mark.parametrize("key", [b'"dtype":"U8",', b'"data_offsets":[0,33],'])
def test_key_twice_in_an_entry(draft, refused: Refused, key: bytes) -> None:
    body = b'{"a.weight":{' + key + b'"dtype":"U8","shape":[33],"data_offsets":[0,33]}}'
    draft.headers[FIRST] = body
    refused(HeaderError, path=draft.directory / FIRST, text="twice")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("I8", [20]), ("BOOL", [20]), ("BF16", [10]), ("FUTURE", [20]), ("U8", [4, 5]), ("U8", [20, 1])],
)
def test_payload_that_is_no_vector_of_bytes(draft, refused: Refused, dtype: str, shape: list[int]) -> None:
    draft.headers[FIRST]["a.weight"] = entry(dtype=dtype, shape=shape)
    refused(HeaderError, path=draft.directory / FIRST, tensor="a.weight", found=f"{dtype}{shape}")


def test_payload_without_dimensions(draft, refused: Refused) -> None:
    draft.headers[SECOND]["c.weight"] = {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}
    draft.data[SECOND] = b"x"
    refused(HeaderError, path=draft.directory / SECOND, tensor="c.weight", found="U8[]")


@pytest.mark.parametrize("metadata", [{}, {"b.weight": CHECKSUM}, {"a.weight ": CHECKSUM}])
def test_tensor_without_a_checksum(draft, refused: Refused, metadata: dict[str, str]) -> None:
    draft.headers[FIRST]["__metadata__"] = metadata
    refused(HeaderError, path=draft.directory / FIRST, tensor="a.weight", text="no checksum")


def test_shard_without_metadata(draft, refused: Refused) -> None:
    del draft.headers[SECOND]["__metadata__"]
    refused(HeaderError, path=draft.directory / SECOND, tensor="c.weight", text="no checksum")


@pytest.mark.parametrize(
    ("algorithm", "checksum"),
    [
        ("xxh3-128", CHECKSUM[:-1]),
        ("xxh3-128", CHECKSUM.upper()),
        ("xxh3-128", CHECKSUM + "0"),
        ("xxh3-128", "g" * 32),
        ("xxh3-128", "0x" + "0" * 30),
        ("xxh3-128", ""),
        ("blake3", CHECKSUM),
        ("adler32", CHECKSUM),
        ("adler32", "-1234567"),
        ("adler32", "١" * 8),
    ],
)
def test_checksum_of_another_form(draft, refused: Refused, algorithm: str, checksum: str) -> None:
    draft.metadata["checksum_format"] = algorithm
    draft.headers[FIRST]["__metadata__"]["a.weight"] = checksum
    refused(HeaderError, path=draft.directory / FIRST, tensor="a.weight", expected=algorithm, found=checksum)


def test_header_of_thousands_of_tensors_is_read(draft) -> None:
    """300 tensors, then about 3 MB of header: what a mixture of many experts looks like."""
    for count in (300, 16_000):
        names = [f"model.layers.{i % 61}.mlp.experts.{i}.gate_and_up_projection.weight" for i in range(count)]
        draft.headers = {
            FIRST: {
                "__metadata__": dict.fromkeys(names, CHECKSUM),
                **{
                    name: {"dtype": "U8", "shape": [3], "data_offsets": [3 * i, 3 * i + 3]}
                    for i, name in enumerate(names)
                },
            }
        }
        draft.data = {FIRST: bytes(3 * count)}
        draft.weight_map = dict.fromkeys(names, FIRST)
        draft.write()
        start = time.monotonic()
        version = read_version(draft.source_dir, 1)
        assert time.monotonic() - start < 10
        assert len(version.tensors) == count
        assert version.headers[FIRST].tensors[names[-1]].offset == version.headers[FIRST].file_bytes - 3
    assert version.headers[FIRST].data_offset > 3_000_000


def test_longest_header_is_bounded_in_memory(draft, refused: Refused) -> None:
    """A sparse file costs its author nothing; 20 MB of it must not cost the reader a multiple."""
    draft.write()
    path = draft.directory / FIRST
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 20_000_000) + b"{")
        file.truncate(20_000_008)
    tracemalloc.start()
    refused(HeaderError, write=False, path=path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
