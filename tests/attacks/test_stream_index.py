"""The index: bad JSON, numbers that disagree, unknown formats, keys that do not go together."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gpusync.errors import IndexFormatError, UnsupportedFormatError, VersionMissingError
from gpusync.stream import read_index, read_version

Refused = Callable[..., Exception]
FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"null",
        b"[]",
        b'"index"',
        b"{}",
        b'{"metadata": {}}',
        b'{"weight_map": null}',
        b'{"weight_map": []}',
        b'{"weight_map": {}} trailing',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf" + b'{"weight_map": {}}',
        b'{"weight_map": {"a": "\xc3"}}',
        b'{"weight_map": {}, "x": NaN}',
        b'{"weight_map": {}, "x": -1e999}',
        b'{"weight_map": {}, "weight_map": {}}',
        b'{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}',
        b'{"metadata": {"version": "000001", "version": "000002"}, "weight_map": {}}',
        b"[" * 100_000,
        b'{"x": ' + b"9" * 5000 + b"}",
    ],
)
def test_index_that_is_no_index(draft, refused: Refused, raw: bytes) -> None:
    draft.write()
    draft.write_index(raw)
    refused(IndexFormatError, write=False)


def test_empty_index_may_still_come(draft, refused: Refused) -> None:
    """Some network filesystems show a name before its bytes."""
    draft.write()
    draft.write_index(b"")
    refused(VersionMissingError, write=False, found="0 bytes")


def test_index_over_the_limit_is_not_read(draft, refused: Refused) -> None:
    draft.write()
    with draft.index_path.open("wb") as file:
        file.truncate(100_000_001)  # sparse
    tracemalloc.start()
    refused(IndexFormatError, write=False, expected="at most 100000000", found=100_000_001)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_index_of_too_many_values(draft, refused: Refused) -> None:
    draft.write()
    draft.write_index(b'{"weight_map": {}, "x": [' + b"{}," * 1_000_000 + b"{}]}")
    refused(IndexFormatError, write=False, expected="at most 2000000")


@pytest.mark.parametrize("metadata", [None, [], "x", 0, False, [["version", "000001"]]])
def test_metadata_that_is_no_object(draft, refused: Refused, metadata: object) -> None:
    draft.metadata = metadata
    refused(IndexFormatError, text="metadata")


NOT_A_VERSION = [
    None,
    True,
    1.0,
    -1,
    [1],
    "",
    "abc",
    "-00001",
    "+00001",
    "1.0",
    " 000001",
    "000001\n",
    "0x1",
    "1e0",
    "1_0",
    "١",
    "²",
    10**12 + 1,
    10**30,
    "9" * 13,
    "1" * 14,
]


@pytest.mark.parametrize("value", NOT_A_VERSION)
@pytest.mark.parametrize("key", ["version", "base_version"])
def test_what_is_no_version_number(draft, refused: Refused, key: str, value: object) -> None:
    draft.metadata[key] = value
    error = refused(IndexFormatError, text=f"{key} is not a version number")
    assert str(value)[:20] in str(error.found)


@pytest.mark.parametrize(("version", "base"), [(1, 0), ("000001", 0), (1, "0"), ("1", "000000")])
def test_numbers_may_be_integers_or_text(draft, version: object, base: object) -> None:
    draft.metadata.update(version=version, base_version=base)
    draft.write()
    index = read_index(draft.source_dir, 1)
    assert (index.version, index.base_version) == (1, 0)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("version", ["000007", 0, "000010"])
def test_version_is_that_of_its_directory(draft, refused: Refused, full: bool, version: object) -> None:
    if full:
        draft.make_full()
    draft.metadata["version"] = version
    draft.metadata.pop("base_version", None) if full else draft.metadata.update(base_version=-0)
    if not full and version == 0:
        refused(IndexFormatError, text="base_version is not below version")
    else:
        refused(IndexFormatError, expected=1, found=int(str(version)))


@pytest.mark.parametrize("base", [1, 2, "000009", 10**12])
def test_base_is_below_the_version(draft, refused: Refused, base: object) -> None:
    draft.metadata["base_version"] = base
    refused(IndexFormatError, expected="< 1", found=int(str(base)))


def test_older_base_than_the_version_before(draft) -> None:
    """A shortcut delta is legitimate."""
    draft.number = 9
    draft.metadata.update(version="000009", base_version="000002")
    draft.write()
    assert read_version(draft.source_dir, 9).index.base_version == 2


@pytest.mark.parametrize("key", ["version", "base_version", "compression_format", "checksum_format"])
def test_delta_lacks_a_key(draft, refused: Refused, key: str) -> None:
    del draft.metadata[key]
    refused(IndexFormatError, text=f"lacks {key}")


@pytest.mark.parametrize("key", ["base_version", "compression_format"])
def test_delta_without_its_encoding_is_no_full_version(draft, refused: Refused, key: str) -> None:
    """Taken for a full version, its payloads would be copied over the weights."""
    draft.make_full()
    draft.metadata = {"version": "000001", key: {"base_version": "000000", "compression_format": "zstd"}[key]}
    refused(IndexFormatError, text="delta_encoding")


@pytest.mark.parametrize("metadata", [{}, {"version": "000001"}, {"checksum_format": "xxh3-128"}])
def test_payloads_are_no_full_version(draft, refused: Refused, metadata: dict[str, str]) -> None:
    draft.metadata = metadata
    refused(IndexFormatError, text="delta_encoding")


def test_nothing_is_no_full_version(draft, refused: Refused) -> None:
    """It would empty the local checkpoint."""
    draft.metadata, draft.weight_map, draft.headers = {}, {}, {}
    refused(IndexFormatError)


def test_full_version_may_hold_byte_vectors_beside_others(draft) -> None:
    draft.make_full()
    draft.headers[FIRST]["a.weight"] = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    draft.write()
    version = read_version(draft.source_dir, 1)
    assert not version.is_delta
    assert version.tensors["a.weight"].dtype == "U8"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta_encoding", "zzz"),
        ("delta_encoding", "XOR"),
        ("delta_encoding", "xor "),
        ("compression_format", "brotli"),
        ("compression_format", "none"),
        ("checksum_format", "crc7"),
        ("checksum_format", "xxh3-64"),
    ],
)
def test_unknown_format(draft, refused: Refused, key: str, value: str) -> None:
    draft.metadata[key] = value
    refused(UnsupportedFormatError, found=value, text=key)


def test_unknown_checksum_format_of_a_full_version(draft, refused: Refused) -> None:
    draft.make_full().metadata["checksum_format"] = "md5"
    refused(UnsupportedFormatError, found="md5", text="checksum_format")


@pytest.mark.parametrize(
    "key", ["delta_encoding", "compression_format", "checksum_format", "stream_id"], ids=lambda key: key
)
@pytest.mark.parametrize("value", [None, 1, True, ["xor"], {}, "", "x" * 129])
def test_format_that_is_no_short_text(draft, refused: Refused, key: str, value: object) -> None:
    draft.metadata[key] = value
    refused(IndexFormatError, text=f"{key} is not a text")


@pytest.mark.parametrize("size", [None, -1, 1.0, True, "69", 2**63])
def test_shard_bytes_that_is_no_size(draft, refused: Refused, size: object) -> None:
    draft.metadata["shard_bytes"] = {FIRST: size}
    refused(IndexFormatError, text=FIRST)


@pytest.mark.parametrize("value", [None, [], "x", 1])
@pytest.mark.parametrize("key", ["shard_bytes", "payload_checksums"])
def test_table_that_is_no_object(draft, refused: Refused, key: str, value: object) -> None:
    draft.metadata[key] = value
    refused(IndexFormatError, text=key)


def make_ours(draft: Any) -> None:
    draft.metadata.update(delta_encoding="gpusync", compression_format="none")
    draft.metadata["payload_checksums"] = dict.fromkeys(draft.weight_map, "0123456789abcdef")


def test_our_encoding_needs_a_checksum_of_every_payload(draft, refused: Refused) -> None:
    make_ours(draft)
    del draft.metadata["payload_checksums"]["b.weight"]
    refused(IndexFormatError, tensor="b.weight", text="payload_checksums")


@pytest.mark.parametrize("checksum", [None, 0, "", "0" * 15, "0" * 17, "0123456789ABCDEF", "g" * 16])
def test_payload_checksum_of_another_form(draft, refused: Refused, checksum: object) -> None:
    make_ours(draft)
    draft.metadata["payload_checksums"]["b.weight"] = checksum
    refused(IndexFormatError, tensor="b.weight", expected="16 lowercase hex digits")


def test_payload_checksum_of_no_tensor(draft, refused: Refused) -> None:
    make_ours(draft)
    draft.metadata["payload_checksums"]["x.weight"] = "0" * 16
    refused(IndexFormatError, tensor="x.weight")


@pytest.mark.parametrize("compression", ["zstd", "brotli"])
def test_our_encoding_is_not_compressed_again(draft, refused: Refused, compression: str) -> None:
    make_ours(draft)
    draft.metadata["compression_format"] = compression
    refused(UnsupportedFormatError, expected="none", found=compression)


def test_long_hostile_values_make_a_short_message(draft, refused: Refused) -> None:
    draft.metadata["version"] = "v" * 100_000
    assert len(str(refused(IndexFormatError))) < 1000


def test_keys_this_reader_does_not_know_are_left_alone(draft) -> None:
    draft.metadata["total_size"] = 1.5
    draft.metadata["later"] = {"deep": [1]}
    draft.write()
    raw = json.loads(draft.index_path.read_bytes())
    draft.write_index(json.dumps({**raw, "also": None}).encode())
    assert read_version(draft.source_dir, 1).version == 1
