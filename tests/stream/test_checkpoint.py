"""Checkpoints: sharded, in one file, of links as in a hub cache, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from gpusync.errors import GpusyncError, HeaderError, IndexFormatError, StreamError, VersionMissingError, Where
from gpusync.stream import (
    INDEX_NAME,
    OpenFiles,
    ShortShardError,
    StoredTensor,
    encode_index,
    read_checkpoint,
)
from gpusync.stream.shards import Shards

TENSORS = {
    "1.safetensors": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int64)},
    "2.safetensors": {"c": np.arange(5, dtype=np.uint8), "空": np.zeros((0, 4), np.float16)},
}
WEIGHT_MAP = {name: file for file, tensors in TENSORS.items() for name in tensors}


def write(directory: Path, *, index: bytes | None = None, metadata: dict[str, str] | None = None) -> Path:
    directory.mkdir()
    for file, tensors in TENSORS.items():
        safetensors.numpy.save_file(tensors, directory / file, metadata=metadata)
    (directory / INDEX_NAME).write_bytes(index or json.dumps({"weight_map": WEIGHT_MAP}).encode())
    return directory


def contents(directory: Path, *, follow_links: bool = False) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = read_checkpoint(directory, follow_links=follow_links)
    found = {}
    with OpenFiles(1) as files:
        for name, tensor in checkpoint.tensors.items():
            data = bytearray(tensor.nbytes)
            with checkpoint.open_tensor(name, files) as source:
                assert source.nbytes == tensor.nbytes
                source.read_into(0, data)
            found[name] = (tensor.dtype, tensor.shape, bytes(data))
    return found


EXPECTED = {
    "a": ("F32", (2, 3), TENSORS["1.safetensors"]["a"].tobytes()),
    "b": ("I64", (), TENSORS["1.safetensors"]["b"].tobytes()),
    "c": ("U8", (5,), b"\0\1\2\3\4"),
    "空": ("F16", (0, 4), b""),
}


def test_sharded(tmp_path: Path) -> None:
    directory = write(tmp_path / "base")
    assert contents(directory) == EXPECTED
    checkpoint = read_checkpoint(str(directory))
    assert checkpoint.directory == directory
    assert checkpoint.headers.keys() == TENSORS.keys()
    assert checkpoint.index is not None
    assert checkpoint.index.version is None
    assert checkpoint.tensors["a"].checksum is None


def test_one_file_without_an_index(tmp_path: Path) -> None:
    """Other files beside it are not looked at, whatever they are called."""
    (tmp_path / "consolidated.safetensors").write_bytes(b"garbage")
    safetensors.numpy.save_file(TENSORS["1.safetensors"], tmp_path / "model.safetensors")
    assert contents(tmp_path) == {name: EXPECTED[name] for name in ("a", "b")}
    assert read_checkpoint(tmp_path).index is None


@pytest.mark.parametrize("single", [True, False])
def test_links_as_in_a_hub_cache(tmp_path: Path, single: bool) -> None:
    blobs = write(tmp_path / "blobs")
    if single:
        safetensors.numpy.save_file(TENSORS["1.safetensors"], blobs / "model.safetensors")
        (blobs / INDEX_NAME).unlink()
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(blobs.iterdir()):
        blob = path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    expected = {name: EXPECTED[name] for name in ("a", "b")} if single else EXPECTED
    assert contents(snapshot, follow_links=True) == expected
    latest = tmp_path / "latest"
    latest.symlink_to(snapshot)
    assert contents(latest, follow_links=True) == expected
    with pytest.raises(StreamError) as caught:
        read_checkpoint(snapshot)
    assert caught.value.found == "a symbolic link"


def test_published_full_version_as_a_base(tmp_path: Path) -> None:
    """Any version, and its checksums come along."""
    checksums = {name: f"{number:032x}" for number, name in enumerate(WEIGHT_MAP)}
    index = encode_index(version=5, checksum_format="xxh3-128", stream_id="x", weight_map=WEIGHT_MAP)
    directory = write(tmp_path / "weight_v000005", index=index, metadata={"format": "pt", **checksums})
    checkpoint = read_checkpoint(directory, where=Where(version=0))
    assert {name: tensor.checksum for name, tensor in checkpoint.tensors.items()} == checksums
    assert checkpoint.index is not None
    assert checkpoint.index.version == 5


def spoil_nothing_there(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def spoil_shard_missing(directory: Path) -> None:
    (directory / "2.safetensors").unlink()


def spoil_shard_cut(directory: Path) -> None:
    path = directory / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def spoil_shard_longer(directory: Path) -> None:
    path = directory / "2.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def spoil_extra_tensor(directory: Path) -> None:
    safetensors.numpy.save_file({**TENSORS["2.safetensors"], "d": np.zeros(1)}, directory / "2.safetensors")


def spoil_tensor_missing(directory: Path) -> None:
    safetensors.numpy.save_file({"空": TENSORS["2.safetensors"]["空"]}, directory / "2.safetensors")


def spoil_tensor_twice(directory: Path) -> None:
    safetensors.numpy.save_file({**TENSORS["2.safetensors"], "a": np.zeros(1)}, directory / "2.safetensors")


def spoil_delta(directory: Path) -> None:
    raw = encode_index(version=2, base_version=1, delta_encoding="xor", checksum_format="blake3", weight_map=WEIGHT_MAP)
    (directory / INDEX_NAME).write_bytes(raw)


def spoil_only_bytes(directory: Path) -> None:
    for file, tensors in TENSORS.items():
        safetensors.numpy.save_file({name: np.zeros(3, np.uint8) for name in tensors}, directory / file)


def spoil_empty(directory: Path) -> None:
    (directory / INDEX_NAME).write_bytes(b'{"weight_map": {}}')


def spoil_no_checksums(directory: Path) -> None:
    raw = encode_index(version=2, checksum_format="blake3", weight_map=WEIGHT_MAP)
    (directory / INDEX_NAME).write_bytes(raw)


@pytest.mark.parametrize(
    ("spoil", "kind", "file", "tensor"),
    [
        (spoil_nothing_there, VersionMissingError, INDEX_NAME, None),
        (spoil_shard_missing, VersionMissingError, "2.safetensors", None),
        (spoil_shard_cut, ShortShardError, "2.safetensors", None),
        (spoil_shard_longer, HeaderError, "2.safetensors", None),
        (spoil_extra_tensor, IndexFormatError, "2.safetensors", "d"),
        (spoil_tensor_missing, IndexFormatError, "2.safetensors", "c"),
        (spoil_tensor_twice, IndexFormatError, "2.safetensors", "a"),
        (spoil_delta, StreamError, INDEX_NAME, None),
        (spoil_only_bytes, IndexFormatError, INDEX_NAME, None),
        (spoil_empty, IndexFormatError, INDEX_NAME, None),
        (spoil_no_checksums, HeaderError, "1.safetensors", "a"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, spoil, kind, file: str, tensor: str | None) -> None:
    directory = write(tmp_path / "base")
    spoil(directory)
    with pytest.raises(GpusyncError) as caught:
        read_checkpoint(directory, where=Where(version=3))
    error = caught.value
    assert type(error) is kind
    assert (error.path, error.version, error.tensor) == (str(directory / file), 3, tensor)


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VersionMissingError) as caught:
        read_checkpoint(tmp_path / "absent")
    assert (caught.value.what, caught.value.path) == ("directory does not exist", str(tmp_path / "absent"))


def test_errors_of_a_read_name_the_tensor(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write(tmp_path / "base"))
    (checkpoint.directory / "1.safetensors").unlink()
    with OpenFiles() as files:
        with pytest.raises(VersionMissingError), checkpoint.open_tensor("a", files):
            pass
        with pytest.raises(KeyError):
            checkpoint.open_tensor("absent", files)


@pytest.mark.parametrize(
    ("dtype", "shape", "only"), [("U8", (3,), True), ("U8", (3, 1), False), ("U8", (), False), ("I8", (3,), False)]
)
def test_byte_vectors(dtype: str, shape: tuple[int, ...], only: bool) -> None:
    tensor = StoredTensor(name="w", dtype=dtype, shape=shape, file="m.safetensors", offset=0, nbytes=3)
    assert Shards(headers={}, tensors={"w": tensor}, duplicates=()).hold_only_byte_vectors is only
