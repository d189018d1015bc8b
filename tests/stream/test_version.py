"""A sound version, seen through everything a reader of it uses. What is refused stands in tests/attacks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from gpusync.errors import Where
from gpusync.stream import (
    INDEX_NAME,
    OpenFiles,
    StoredTensor,
    TensorSpec,
    check_against,
    encode_header,
    encode_index,
    read_index,
    read_version,
)

PAYLOADS = {"m-1.safetensors": {"a": b"12345678", "b": b""}, "m-2.safetensors": {"c": b"x" * 1000}}
CHECKSUM = "0" * 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Version 3 on version 1, in our own encoding, with every key an index may have."""
    directory = tmp_path / "weight_v000003"
    directory.mkdir()
    lengths = {}
    for file, payloads in PAYLOADS.items():
        tensors = [TensorSpec(name=n, dtype="U8", shape=(len(p),), nbytes=len(p)) for n, p in payloads.items()]
        raw = encode_header(tensors, dict.fromkeys(payloads, CHECKSUM)) + b"".join(payloads.values())
        (directory / file).write_bytes(raw)
        lengths[file] = len(raw)
    weight_map = {name: file for file, payloads in PAYLOADS.items() for name in payloads}
    index = encode_index(
        version=3,
        base_version=1,
        delta_encoding="gpusync",
        checksum_format="blake3",
        stream_id="6f1c",
        shard_bytes=lengths,
        payload_checksums={name: f"{number:016x}" for number, name in enumerate(weight_map)},
        weight_map=weight_map,
    )
    (directory / INDEX_NAME).write_bytes(index)
    return tmp_path


def test_what_a_version_says(source: Path) -> None:
    version = read_version(source, 3)
    assert (version.version, version.path, version.is_delta) == (3, source / "weight_v000003", True)
    assert (version.index.base_version, version.index.stream_id) == (1, "6f1c")
    assert version.wire_bytes == sum(path.stat().st_size for path in version.path.iterdir())
    assert version.duplicates == ()
    start = version.headers["m-1.safetensors"].data_offset
    assert version.tensors["a"] == StoredTensor(
        name="a",
        dtype="U8",
        shape=(8,),
        file="m-1.safetensors",
        offset=start,
        nbytes=8,
        checksum=CHECKSUM,
        payload_checksum=f"{0:016x}",
    )
    assert version.where(version.tensors["c"]) == Where(path=version.path / "m-2.safetensors", version=3, tensor="c")


@pytest.mark.parametrize("limit", [1, 128])
def test_payloads(source: Path, limit: int) -> None:
    version = read_version(str(source), 3)
    with OpenFiles(limit) as files:
        for payloads in PAYLOADS.values():
            for name, expected in payloads.items():
                data = bytearray(len(expected))
                with version.open_payload(name, files) as payload:
                    payload.read_into(0, data)
                assert data == expected
        with pytest.raises(KeyError):
            version.open_payload("absent", files)


def test_index_is_read_without_its_shards(source: Path) -> None:
    whole = read_version(source, 3).index
    for file in PAYLOADS:
        (source / "weight_v000003" / file).unlink()
    assert read_index(source, 3) == whole


def test_fits_a_base(source: Path) -> None:
    """Names of the base that the version does not change play no part; sizes of 0 and 1 do fit."""
    base = {
        name: StoredTensor(name=name, dtype="I8", shape=(nbytes,), file="m.safetensors", offset=0, nbytes=nbytes)
        for name, nbytes in {"a": 0, "b": 1, "c": 1, "d": 5}.items()
    }
    check_against(read_version(source, 3), base)


def test_is_immutable(source: Path) -> None:
    version = read_version(source, 3)
    with pytest.raises(FrozenInstanceError):
        version.version = 4  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        version.tensors["a"].offset = 0  # type: ignore[misc]
