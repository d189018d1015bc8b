"""The index: round trip, what a plain Hugging Face index becomes, and what slime writes."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import IndexFormatError, UnsupportedFormatError, Where
from gpusync.stream import VersionIndex, encode_index, parse_index
from gpusync.stream.formats import COMPRESSION_OF, max_payload_bytes

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FILES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\\\0"), max_size=20).map(
    lambda stem: f"{stem}.safetensors"
)
HEX = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from([None, "xor", "overwrite", "gpusync"]))
    version = data.draw(st.integers(1, 10**12))
    weight_map = data.draw(st.dictionaries(TEXT.filter(lambda name: name != "__metadata__"), FILES, max_size=5))
    fields: dict[str, object] = {
        "version": version,
        "weight_map": weight_map,
        "base_version": None if encoding is None else data.draw(st.integers(0, version - 1)),
        "delta_encoding": encoding,
        "checksum_format": data.draw(st.sampled_from(["xxh3-128", "blake3", "adler32"])),
        "stream_id": data.draw(st.none() | st.uuids().map(str)),
        "shard_bytes": {file: data.draw(st.integers(0, 2**63 - 1)) for file in weight_map.values()},
        "payload_checksums": {name: data.draw(HEX) for name in weight_map},
    }
    raw = encode_index(**fields, total_size=17)  # type: ignore[arg-type]
    index = parse_index(raw, where=Where(version=version))
    assert {name: getattr(index, name) for name in fields} == fields
    assert index.compression_format == (None if encoding is None else COMPRESSION_OF[encoding])
    assert index.is_delta is (encoding is not None)
    assert (index.index_bytes, index.digest) == (len(raw), xxhash.xxh3_128_hexdigest(raw))
    assert list(index.weight_map) == list(weight_map)


def test_numbers_are_written_as_slime_writes_them() -> None:
    raw = encode_index(
        version=42, base_version=41, delta_encoding="xor", checksum_format="adler32", weight_map={"w": "m.safetensors"}
    )
    assert json.loads(raw) == {
        "metadata": {
            "version": "000042",
            "base_version": "000041",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        },
        "weight_map": {"w": "m.safetensors"},
    }


@pytest.mark.parametrize("metadata", [{}, {"metadata": {}}, {"metadata": {"total_size": 16}}])
@pytest.mark.parametrize("version", [None, 5])
def test_plain_index(metadata: dict[str, object], version: int | None) -> None:
    """Its version is its directory's."""
    raw = json.dumps({**metadata, "weight_map": {"w": "m.safetensors"}}).encode()
    index = parse_index(raw, where=Where(version=version))
    assert index == VersionIndex(
        version=version,
        weight_map={"w": "m.safetensors"},
        digest=xxhash.xxh3_128_hexdigest(raw),
        index_bytes=len(raw),
    )
    assert not index.is_delta


def test_index_outside_of_a_version_keeps_its_own_number() -> None:
    raw = encode_index(version=5, weight_map={"w": "m.safetensors"})
    assert parse_index(raw).version == 5


def test_digest_is_of_the_bytes_not_of_their_meaning() -> None:
    raw = encode_index(version=5, weight_map={"w": "m.safetensors"})
    assert parse_index(raw).digest != parse_index(raw + b" ").digest


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"weight_map": {"w": "../m.safetensors"}}, IndexFormatError),
        ({"weight_map": {"w": "m.bin"}}, IndexFormatError),
        ({"delta_encoding": "zzz"}, UnsupportedFormatError),
        ({"checksum_format": "md5"}, UnsupportedFormatError),
        ({"base_version": 42}, IndexFormatError),
        ({"version": -1}, IndexFormatError),
        ({"delta_encoding": "gpusync"}, IndexFormatError),
        ({"payload_checksums": {"w": "x"}}, IndexFormatError),
        ({"base_version": None}, IndexFormatError),
    ],
)
def test_writer_refuses_what_no_reader_takes(changes: dict[str, object], kind: type[Exception]) -> None:
    sound: dict[str, object] = {
        "version": 42,
        "base_version": 41,
        "delta_encoding": "xor",
        "checksum_format": "xxh3-128",
        "weight_map": {"w": "m.safetensors"},
    }
    encode_index(**sound)  # type: ignore[arg-type]
    with pytest.raises(kind):
        encode_index(**{**sound, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
@pytest.mark.parametrize("nbytes", [0, 1, 1 << 17, 1 << 33])
def test_bound_of_a_payload_leaves_room_for_the_worst(encoding: str, nbytes: int) -> None:
    """Raw zstd blocks of 128 KiB with 3 bytes each around every byte of the delta, and a frame header of 18 bytes."""
    raw = 4 + 5 * nbytes if encoding == "overwrite" else nbytes
    blocks = max(1, -(-raw // (1 << 17)))
    assert raw + 3 * blocks + 18 <= max_payload_bytes(encoding, nbytes) <= 2 * raw + (1 << 20)
