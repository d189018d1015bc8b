"""What tells a version from another under the same number, where nothing in the index does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from gpusync.stream import read_identity, read_index
from support.checkpoints import INDEX, State, changed, tensor
from support.slime import publish_delta, publish_full, version_dir

STREAM_ID = "11111111-0000-4000-8000-000000000000"


@pytest.fixture
def state() -> State:
    rng = np.random.default_rng(0)
    return {"a": tensor(rng, "BF16", 30), "b": tensor(rng, "F32", 5)}


def identity(source: Path, version: int) -> str | None:
    return read_identity(source, version, read_index(source, version))


def republish(source: Path, version: int, *states: State, **options) -> None:
    shutil.rmtree(version_dir(source, version))
    publish_delta(source, version, *states, **options)


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_other_weights_under_the_same_index(tmp_path: Path, state: State, checksum: str) -> None:
    publish_delta(tmp_path, 1, state, changed(state, 1), checksum=checksum)
    index, first = read_index(tmp_path, 1).digest, identity(tmp_path, 1)
    republish(tmp_path, 1, state, changed(state, 2), checksum=checksum)
    assert read_index(tmp_path, 1).digest == index
    assert identity(tmp_path, 1) not in (None, first)
    republish(tmp_path, 1, state, changed(state, 1), checksum=checksum)
    assert identity(tmp_path, 1) == first


def test_a_named_run_needs_no_shards(tmp_path: Path, state: State) -> None:
    directory = publish_delta(tmp_path, 1, state, changed(state, 1), metadata={"stream_id": STREAM_ID})
    for shard in directory.glob("*.safetensors"):
        shard.unlink()
    assert identity(tmp_path, 1) == read_index(tmp_path, 1).digest


def test_a_version_that_changes_nothing_is_told_by_what_it_builds_on(tmp_path: Path, state: State) -> None:
    for version, new in enumerate([changed(state, 1)] * 3, start=1):
        publish_delta(tmp_path, version, state if version == 1 else new, new)
    first = identity(tmp_path, 3)
    republish(tmp_path, 1, state, changed(state, 2))
    assert identity(tmp_path, 3) not in (None, first)
    shutil.rmtree(version_dir(tmp_path, 1))
    assert identity(tmp_path, 3) is None


def test_a_version_that_changes_nothing_of_the_base_is_told(tmp_path: Path, state: State) -> None:
    publish_delta(tmp_path, 1, state, state)
    assert identity(tmp_path, 1) is not None


def test_a_plain_checkpoint_is_told_by_its_files(tmp_path: Path, state: State) -> None:
    directory = publish_full(tmp_path, 1, state)
    first = identity(tmp_path, 1)
    assert identity(tmp_path, 1) == first
    os.utime(next(directory.glob("*.safetensors")))
    assert identity(tmp_path, 1) not in (None, first)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x08\0\0\0\0\0\0\0{"])
def test_what_cannot_be_told(tmp_path: Path, state: State, damage: bytes) -> None:
    directory = publish_delta(tmp_path, 1, state, changed(state, 1))
    shard = next(directory.glob("*.safetensors"))
    shard.write_bytes(damage)
    assert identity(tmp_path, 1) is None
    shard.unlink()
    assert identity(tmp_path, 1) is None
    assert (directory / INDEX).exists()
