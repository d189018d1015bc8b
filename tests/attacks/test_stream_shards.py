"""A version against its files: half visible, names that disagree, files that change under the reader, a wrong base."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping

import pytest

from gpusync.errors import (
    ChainError,
    GpusyncError,
    HeaderError,
    IndexFormatError,
    PayloadError,
    SourceReadError,
    StreamError,
    VersionMissingError,
)
from gpusync.stream import (
    OpenFiles,
    StoredTensor,
    check_against,
    compare_duplicates,
    read_index,
    read_version,
    wait_until_visible,
)

Refused = Callable[..., GpusyncError]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Clock:
    """Time that passes only while somebody sleeps; `events` happen when their time has come."""

    def __init__(self, events: Mapping[float, Callable[[], object]]) -> None:
        self.now = 0.0
        self.events = dict(sorted(events.items()))
        self.looks = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in [time for time in self.events if time <= self.now]:
            self.events.pop(time)()

    def wait(self, read: Callable[[], object], timeout_s: float) -> object:
        return wait_until_visible(
            read, refresh=self.look, timeout_s=timeout_s, sleep=self.sleep, clock=lambda: self.now
        )

    def look(self) -> None:
        self.looks += 1


# What may still come.


def test_version_that_is_not_there(draft, refused: Refused) -> None:
    draft.source_dir.mkdir()
    refused(VersionMissingError, write=False, path=draft.directory)


def test_source_directory_that_is_not_there(draft, refused: Refused) -> None:
    refused(VersionMissingError, write=False, path=draft.directory)


def test_shards_before_the_index(draft, refused: Refused) -> None:
    for name in draft.headers:
        draft.write_shard(name)
    refused(VersionMissingError, write=False)


@pytest.mark.parametrize("name", ["model.safetensors.index.json.tmp", ".model.safetensors.index.json", "index.json"])
def test_index_under_another_name_does_not_count(draft, refused: Refused, name: str) -> None:
    draft.write()
    draft.index_path.rename(draft.directory / name)
    refused(VersionMissingError, write=False)


def test_index_before_the_shards(draft, refused: Refused) -> None:
    draft.write_index()
    refused(VersionMissingError, write=False, path=draft.directory / FIRST)


def test_index_before_one_shard(draft, refused: Refused) -> None:
    draft.write_index()
    draft.write_shard(FIRST)
    refused(VersionMissingError, write=False, path=draft.directory / SECOND)


@pytest.mark.parametrize("length", [0, 7, 8, 50])
def test_shard_is_short_by_its_header(draft, refused: Refused, length: int) -> None:
    path = draft.write().directory / SECOND
    whole = path.stat().st_size
    header = whole - len(draft.data[SECOND])
    os.truncate(path, length)
    expected = 8 if length < 8 else header
    refused(VersionMissingError, write=False, path=path, expected=expected, found=length)


@pytest.mark.parametrize("missing", [1, 5, 100])
def test_shard_is_short_by_the_index(draft, refused: Refused, missing: int) -> None:
    """With `shard_bytes` the full length is known, whatever part of the file is there."""
    path = draft.write().directory / SECOND
    whole = path.stat().st_size
    draft.metadata["shard_bytes"] = {SECOND: whole}
    draft.write_index()
    os.truncate(path, whole - missing)
    refused(VersionMissingError, write=False, path=path, expected=whole, found=whole - missing)


def test_shard_of_the_right_length_with_a_header_that_wants_more(draft, refused: Refused) -> None:
    """Nothing more will come, so waiting is no use."""
    draft.data[SECOND] = b"pay"
    path = draft.write().directory / SECOND
    whole = path.stat().st_size
    draft.metadata["shard_bytes"] = {SECOND: whole}
    refused(HeaderError, path=path, expected=whole + 4, found=whole)


def test_shard_longer_than_the_index_says(draft, refused: Refused) -> None:
    path = draft.write().directory / SECOND
    draft.metadata["shard_bytes"] = {SECOND: 10}
    refused(HeaderError, path=path, expected=10, found=path.stat().st_size)


def test_what_waiting_cannot_mend_comes_first(draft, refused: Refused) -> None:
    """The first shard is missing, the second is wrong for ever: a trainer must not wait for the first."""
    draft.data[SECOND] += b"x"
    draft.write()
    (draft.directory / FIRST).unlink()
    refused(HeaderError, write=False, path=draft.directory / SECOND)


def test_version_that_appears_in_time(draft) -> None:
    """Every half-visible state on the way is waited through; each look is preceded by a refresh."""
    events = {
        1.0: draft.write_index,
        2.0: lambda: draft.write_shard(FIRST),
        3.0: lambda: (draft.directory / SECOND).write_bytes(b"\x10"),
        4.0: lambda: draft.write_shard(SECOND),
    }
    clock = Clock(events)
    version = clock.wait(lambda: read_version(draft.source_dir, 1), timeout_s=60)
    assert len(version.tensors) == 3
    assert 4 <= clock.now <= 5
    assert 8 <= clock.looks <= 12


def test_version_that_appears_too_late(draft) -> None:
    clock = Clock({1.0: draft.write_index, 61.0: draft.write})
    with pytest.raises(VersionMissingError) as caught:
        clock.wait(lambda: read_version(draft.source_dir, 1), timeout_s=60)
    assert caught.value.path == str(draft.directory / FIRST)
    assert caught.value.version == 1
    assert clock.now == 60


def test_version_that_turns_out_wrong_is_not_waited_for(draft) -> None:
    draft.metadata["delta_encoding"] = "zzz"
    clock = Clock({1.0: draft.write})
    with pytest.raises(StreamError):
        clock.wait(lambda: read_version(draft.source_dir, 1), timeout_s=60)
    assert clock.now < 3


# Names.


def test_index_names_a_tensor_its_shard_lacks(draft, refused: Refused) -> None:
    draft.weight_map["x.weight"] = FIRST
    refused(IndexFormatError, path=draft.directory / FIRST, tensor="x.weight")


def test_index_names_the_wrong_shard(draft, refused: Refused) -> None:
    draft.weight_map["c.weight"] = FIRST
    refused(IndexFormatError, path=draft.directory / FIRST, tensor="c.weight")


def test_shard_holds_a_tensor_the_index_does_not_name(draft, refused: Refused) -> None:
    del draft.weight_map["b.weight"]
    refused(IndexFormatError, path=draft.directory / FIRST, tensor="b.weight")


def test_shard_the_index_does_not_name_is_ignored(draft) -> None:
    """Not even opened: it may be anything."""
    draft.write()
    (draft.directory / "model-00003-of-00002.safetensors").write_bytes(b"garbage")
    os.mkfifo(draft.directory / "model.safetensors")
    assert read_version(draft.source_dir, 1).headers.keys() == {FIRST, SECOND}


def test_version_that_changes_nothing(draft) -> None:
    draft.weight_map, draft.headers = {}, {}
    draft.write()
    version = read_version(draft.source_dir, 1)
    assert version.is_delta
    assert not version.tensors
    assert version.wire_bytes == draft.index_path.stat().st_size


def test_full_version_holds_a_tensor_twice(draft, refused: Refused) -> None:
    draft.make_full()
    draft.headers[SECOND]["a.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    draft.data[SECOND] = bytes(16)
    refused(IndexFormatError, path=draft.directory / SECOND, tensor="a.weight")


@pytest.mark.parametrize("number", [1, 2])
def test_index_in_another_versions_directory(draft, refused: Refused, number: int) -> None:
    draft.write()
    draft.directory.rename(draft.source_dir / "weight_v000003")
    draft.number = 3
    refused(IndexFormatError, write=False, expected=3, found=1)


# A full version without an index.


def lone_file(draft, header: dict[str, object], data: bytes) -> None:
    draft.headers, draft.data = {"model.safetensors": header}, {"model.safetensors": data}
    draft.write_shard("model.safetensors")


def test_lone_file_is_a_full_version(draft) -> None:
    lone_file(draft, {"a.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"abcd")
    version = read_version(draft.source_dir, 1)
    assert (version.is_delta, version.index.version, version.index.index_bytes) == (False, 1, 0)
    assert version.index == read_index(draft.source_dir, 1)
    assert len(version.index.digest) == 32
    assert version.wire_bytes == (draft.directory / "model.safetensors").stat().st_size
    before = version.index.digest
    lone_file(draft, {"b.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"abcd")
    assert read_index(draft.source_dir, 1).digest != before


def test_lone_file_of_payloads_waits_for_its_index(draft, refused: Refused) -> None:
    lone_file(draft, {"a.weight": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"abcd")
    refused(VersionMissingError, write=False)


def test_lone_file_that_is_still_written(draft, refused: Refused) -> None:
    lone_file(draft, {"a.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"ab")
    refused(VersionMissingError, write=False, path=draft.directory / "model.safetensors")
    with pytest.raises(VersionMissingError):
        read_index(draft.source_dir, 1)


# The same tensor in two shards.


def in_two_shards(draft, *, payload: bytes = bytes(range(20)), checksum: str = "0123456789abcdef" * 2) -> None:
    draft.headers[SECOND]["a.weight"] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [7, 7 + len(payload)]}
    draft.headers[SECOND]["__metadata__"]["a.weight"] = checksum
    draft.data[SECOND] = b"payload" + payload
    draft.write()


def test_equal_payloads_count_once(draft) -> None:
    in_two_shards(draft)
    version = read_version(draft.source_dir, 1)
    assert len(version.tensors) == 3
    assert [(kept.file, other.file) for kept, other in version.duplicates] == [(FIRST, SECOND)]
    with OpenFiles() as files:
        compare_duplicates(version, files)


@pytest.mark.parametrize(
    "change",
    [{"payload": bytes(20)}, {"payload": bytes(range(19))}, {"payload": b""}, {"checksum": "f" * 32}],
    ids=["bytes", "shorter", "empty", "checksum"],
)
def test_payloads_that_differ(draft, change) -> None:
    in_two_shards(draft, **change)
    version = read_version(draft.source_dir, 1)
    with OpenFiles() as files, pytest.raises(StreamError) as caught:
        compare_duplicates(version, files)
    error = caught.value
    assert type(error) is StreamError
    assert (error.tensor, error.version, error.path) == ("a.weight", 1, str(draft.directory / SECOND))
    assert error.expected != error.found


def test_large_payloads_that_differ_in_the_last_byte(draft) -> None:
    """Longer than what is compared at once (1 MiB)."""
    payload = bytes((1 << 20) + 1)
    draft.headers[FIRST]["a.weight"] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    del draft.headers[FIRST]["b.weight"], draft.weight_map["b.weight"]
    draft.data[FIRST] = payload
    in_two_shards(draft, payload=payload)
    with OpenFiles() as files:
        compare_duplicates(read_version(draft.source_dir, 1), files)
        in_two_shards(draft, payload=payload[:-1] + b"x")
    with OpenFiles() as files, pytest.raises(StreamError):
        compare_duplicates(read_version(draft.source_dir, 1), files)


def test_duplicate_without_a_checksum(draft, refused: Refused) -> None:
    in_two_shards(draft)
    del draft.headers[SECOND]["__metadata__"]["a.weight"]
    refused(HeaderError, path=draft.directory / SECOND, tensor="a.weight")


def test_duplicate_that_is_no_vector_of_bytes(draft, refused: Refused) -> None:
    in_two_shards(draft)
    draft.headers[SECOND]["a.weight"]["dtype"] = "I8"
    refused(HeaderError, path=draft.directory / SECOND, tensor="a.weight")


# The base.


def test_delta_for_a_tensor_the_base_lacks(draft, base: dict[str, StoredTensor]) -> None:
    version = read_version(draft.write().source_dir, 1)
    check_against(version, base)
    del base["b.weight"]
    with pytest.raises(ChainError) as caught:
        check_against(version, base)
    assert (caught.value.tensor, caught.value.version) == ("b.weight", 1)
    assert caught.value.path == str(draft.directory / FIRST)


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
def test_payload_far_longer_than_its_tensor_could_need(draft, base: dict[str, StoredTensor], encoding: str) -> None:
    """Nobody fetches a gigabyte for a tensor of 64 bytes. The file is sparse: its author paid nothing."""
    length = 1 << 30
    if encoding == "gpusync":
        draft.metadata.update(compression_format="none", payload_checksums=dict.fromkeys(draft.weight_map, "0" * 16))
    draft.metadata["delta_encoding"] = encoding
    draft.headers[SECOND]["c.weight"] = {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}
    draft.data[SECOND] = b""
    path = draft.write().directory / SECOND
    os.truncate(path, path.stat().st_size + length)
    version = read_version(draft.source_dir, 1)
    with pytest.raises(PayloadError) as caught:
        check_against(version, base)
    assert (caught.value.tensor, caught.value.path, caught.value.found) == ("c.weight", str(path), length)


def test_full_version_has_no_base(draft) -> None:
    check_against(read_version(draft.make_full().write().source_dir, 1), {})


# Files that change after they were checked.


def test_shard_that_vanishes_after_it_was_checked(draft) -> None:
    version = read_version(draft.write().source_dir, 1)
    (draft.directory / SECOND).unlink()
    with OpenFiles() as files, pytest.raises(VersionMissingError) as caught, version.open_payload("c.weight", files):
        pass
    assert (caught.value.version, caught.value.path) == (1, str(draft.directory / SECOND))


def test_shard_that_vanishes_while_it_is_read(draft) -> None:
    version = read_version(draft.write().source_dir, 1)
    with OpenFiles(1) as files, version.open_payload("c.weight", files) as payload:
        with version.open_payload("a.weight", files):
            pass  # takes the only place
        (draft.directory / SECOND).unlink()
        with pytest.raises(VersionMissingError):
            payload.read_into(0, bytearray(7))


@pytest.mark.parametrize("held", [True, False])
def test_shard_that_shrinks_after_it_was_checked(draft, held: bool) -> None:
    version = read_version(draft.write().source_dir, 1)
    path = draft.directory / SECOND
    with OpenFiles() as files:
        if held:
            with version.open_payload("c.weight", files) as payload:
                os.truncate(path, path.stat().st_size - 3)
                with pytest.raises(HeaderError) as caught:
                    payload.read_into(0, bytearray(7))
        else:
            os.truncate(path, path.stat().st_size - 3)
            with pytest.raises(HeaderError) as caught, version.open_payload("c.weight", files):
                pass
    assert (caught.value.tensor, caught.value.version, caught.value.path) == ("c.weight", 1, str(path))
    assert caught.value.expected != caught.value.found


def test_nothing_stays_open(draft, base: dict[str, StoredTensor]) -> None:
    """A hook may have to refresh a mount, which fails as long as a file on it is open."""
    before = os.listdir("/proc/self/fd")
    version = read_version(draft.write().source_dir, 1)
    check_against(version, base)
    with OpenFiles() as files:
        compare_duplicates(version, files)
    draft.lengths[FIRST] = 2**62
    draft.write()
    with pytest.raises(HeaderError):
        read_version(draft.source_dir, 1)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "preadv", "fstat", "stat"])
def test_filesystem_that_fails(draft, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """May pass, so it is retried; it is never taken for a missing or a bad version."""
    draft.write()
    real = getattr(os, call)

    def fail(*args: object, **kwargs: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(f"gpusync.stream.files.os.{call}", fail)
    try:
        with pytest.raises(SourceReadError) as caught:
            read_version(draft.source_dir, 1)
    finally:
        monkeypatch.setattr(f"gpusync.stream.files.os.{call}", real)
    assert caught.value.found == os.strerror(code)
    assert caught.value.version == 1
    assert read_version(draft.source_dir, 1).version == 1
