"""One rank's files: cut, named, rewritten and removed, and told from everybody else's."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpusync.errors import PublishError
from gpusync.publish.encode import Stored
from gpusync.publish.shards import ShardSet, remove_leftovers
from gpusync.stream import SourceFile, read_header


def stored(name: str, nbytes: int) -> Stored:
    data = np.full(nbytes, len(name), np.uint8)
    return Stored(name=name, dtype="U8", shape=(nbytes,), data=data, checksum="c" + name, payload_checksum="p" + name)


def shard_set(directory, *, shard_bytes=100, is_full=False, rank=2):
    return ShardSet(directory, is_full=is_full, rank=rank, size=4, shard_bytes=shard_bytes)


def contents(directory):
    found = {}
    for name in sorted(os.listdir(directory)):
        with SourceFile(directory / name) as file:
            header = read_header(file)
            found[name] = list(header.tensors), dict(header.metadata)
            for tensor in header.tensors.values():
                assert file.read_at(tensor.offset, tensor.nbytes) == bytes([len(tensor.name)]) * tensor.nbytes
    return found


def test_a_shard_is_written_when_enough_has_come_together(tmp_path):
    shards = shard_set(tmp_path)
    for name, nbytes in {"a": 60, "bb": 40, "ccc": 99}.items():
        shards.add(stored(name, nbytes))
    assert len(os.listdir(tmp_path)) == 1
    shards.flush()
    shards.flush()
    (first, _), (second, _) = contents(tmp_path).values()
    assert (first, second) == (["bb", "a"], ["ccc"])
    assert shards.weight_map.keys() == shards.payload_checksums.keys() == {"a", "bb", "ccc"}
    assert shards.files == {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path)}


def test_no_two_attempts_share_a_name(tmp_path):
    for _ in range(3):
        shards = shard_set(tmp_path)
        shards.add(stored("a", 200))
    assert len(os.listdir(tmp_path)) == 3
    assert all(name.startswith("delta-00002-of-00004-") for name in os.listdir(tmp_path))


def test_aligned_tensors_come_first(tmp_path):
    shards = shard_set(tmp_path, shard_bytes=1000)
    for name, nbytes in {"odd": 7, "eight": 16, "two": 6, "four": 12, "none": 0}.items():
        shards.add(stored(name, nbytes))
    shards.flush()
    ((names, _),) = contents(tmp_path).values()
    assert names == ["eight", "none", "four", "two", "odd"]


def test_dropped_tensors_leave_pending_and_written_shards(tmp_path):
    shards = shard_set(tmp_path)
    for name, nbytes in {"a": 60, "bb": 60, "ccc": 100, "dddd": 10, "eeeee": 10}.items():
        shards.add(stored(name, nbytes))
    before = set(os.listdir(tmp_path))
    assert len(before) == 2
    shards.drop({"a", "ccc", "dddd", "unknown"})
    shards.flush()
    after = contents(tmp_path)
    assert list(after.values()) == [(["bb"], {"bb": "cbb"}), (["eeeee"], {"eeeee": "ceeeee"})]
    assert not before.intersection(after)
    assert shards.weight_map.keys() == shards.payload_checksums.keys() == {"bb", "eeeee"}
    assert shards.files.keys() == after.keys()


def test_a_replaced_shard_that_stays_is_an_error(tmp_path, monkeypatch):
    shards = shard_set(tmp_path)
    shards.add(stored("a", 100))
    monkeypatch.setattr("gpusync.publish.shards.remove_file", lambda path: False)
    with pytest.raises(PublishError, match="cannot remove"):
        shards.drop({"a"})


def test_remove_takes_back_everything(tmp_path):
    shards = shard_set(tmp_path)
    for name in ("a", "bb", "ccc"):
        shards.add(stored(name, 100))
    shards.drop({"bb"})
    (tmp_path / "other").write_bytes(b"1")
    shards.remove()
    assert os.listdir(tmp_path) == ["other"]


def test_a_full_version_says_pt_and_reserves_the_name(tmp_path):
    shards = shard_set(tmp_path, is_full=True)
    shards.add(stored("a", 100))
    assert next(iter(contents(tmp_path).values()))[1] == {"format": "pt", "a": "ca"}
    with pytest.raises(PublishError, match="cannot be named so"):
        shards.add(stored("format", 1))
    shard_set(tmp_path).add(stored("format", 1))


@pytest.mark.parametrize(
    ("rank", "size", "gone"),
    [(0, 4, {0}), (1, 4, {1}), (0, 2, {0, 2, 3}), (1, 2, {1})],
)
def test_leftovers_are_a_ranks_own(tmp_path, rank, size, gone):
    names = {}
    for writer in range(4):
        for kind in ("delta", "model"):
            name = f"{kind}-{writer:05d}-of-00004-0123456789ab-00001.safetensors"
            names[name] = writer
            names[f".{name}.0123456789ab.tmp"] = writer
    for name in [*names, "config.json", "notes.txt"]:
        (tmp_path / name).write_bytes(b"1")
        os.utime(tmp_path / name, (0, 0))
    assert remove_leftovers(tmp_path, rank=rank, size=size) == []
    left = {name for name, writer in names.items() if writer not in gone} | {"config.json", "notes.txt"}
    assert set(os.listdir(tmp_path)) == left


def test_a_strangers_shard_is_reported_by_rank_0_only(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"1")
    assert remove_leftovers(tmp_path, rank=1, size=4) == []
    with pytest.raises(PublishError, match="another writer"):
        remove_leftovers(tmp_path, rank=0, size=4)
