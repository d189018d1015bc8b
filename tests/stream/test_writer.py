"""Files of a stream are written once, durably, and also where nothing can be renamed, linked, overwritten or synced."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpusync.errors import HeaderError, PublishError
from gpusync.stream.files import SourceFile
from gpusync.stream.header import read_header
from gpusync.stream.index import INDEX_NAME
from gpusync.stream.writer import ShardEntry, make_version_directory, remove_file, write_file, write_index, write_shard

renaming = pytest.mark.parametrize("atomic_rename", [True, False, None])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The os calls that matter, in order, by their names and what they were called on."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in ("open", "fsync", "close", "rename", "unlink")}

    def on_path(name: str):  # type: ignore[no-untyped-def]
        def call(path: str | Path, *args: object, **kwargs: object) -> object:
            made.append(f"{name} {os.path.basename(path)}")
            return real[name](path, *args, **kwargs)

        return call

    def on_descriptor(name: str):  # type: ignore[no-untyped-def]
        def call(descriptor: int) -> object:
            kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
            made.append(f"{name} {kind}")
            return real[name](descriptor)

        return call

    for name in ("open", "rename", "unlink"):
        monkeypatch.setattr(os, name, on_path(name))
    for name in ("fsync", "close"):
        monkeypatch.setattr(os, name, on_descriptor(name))
    yield made
    monkeypatch.undo()


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "not on this filesystem")


@renaming
def test_a_shard_reads_back(tmp_path: Path, atomic_rename: bool | None) -> None:
    entries = [
        ShardEntry(name="a", dtype="F32", shape=(2,), data=np.arange(8, dtype=np.uint8)),
        ShardEntry(name="empty", dtype="BF16", shape=(0, 7), data=b""),
        ShardEntry(name="b", dtype="U8", shape=(5,), data=[b"he", bytearray(b"l"), memoryview(b"lo")]),
    ]
    nbytes = write_shard(tmp_path, "one.safetensors", entries, {"a": "checksum"}, atomic_rename=atomic_rename)
    with SourceFile(tmp_path / "one.safetensors") as file:
        header = read_header(file)
        assert nbytes == file.nbytes == header.file_bytes
        assert dict(header.metadata) == {"a": "checksum"}
        assert [(t.name, t.dtype, t.shape) for t in header.tensors.values()] == [
            ("a", "F32", (2,)),
            ("empty", "BF16", (0, 7)),
            ("b", "U8", (5,)),
        ]
        assert file.read_at(header.tensors["a"].offset, 8) == bytes(range(8))
        assert file.read_at(header.tensors["b"].offset, 5) == b"hello"
        assert header.tensors["a"].offset % 8 == 0
    assert os.listdir(tmp_path) == ["one.safetensors"]


def test_where_rename_is_atomic_the_final_name_appears_whole(tmp_path: Path, calls: list[str]) -> None:
    write_index(tmp_path, b"{}", atomic_rename=True)
    opened, *rest = calls
    assert opened.startswith("open .")
    assert opened.endswith(".tmp")
    temporary = opened.removeprefix("open ")
    assert rest == [
        "fsync file",
        "close file",
        f"rename {temporary}",
        f"open {tmp_path.name}",
        "fsync directory",
        "close directory",
    ]


def test_elsewhere_the_final_name_is_written_directly(tmp_path: Path, calls: list[str]) -> None:
    write_index(tmp_path, b"{}", atomic_rename=False)
    assert calls[:3] == [f"open {INDEX_NAME}", "fsync file", "close file"]
    assert not any(call.startswith("rename") for call in calls)


@pytest.mark.parametrize(
    ("fs_type", "renames"), [("ext4", True), ("nfs4", True), ("fuse.mountpoint-s3", False), ("unknown", False)]
)
def test_the_filesystem_decides(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch, fs_type: str, renames: bool
) -> None:
    monkeypatch.setattr("gpusync.stream.writer.filesystem_type", lambda _: fs_type)
    write_file(tmp_path, "x", [b"1"])
    assert any(call.startswith("rename") for call in calls) == renames


@renaming
def test_without_rename_link_overwrite_and_directory_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic_rename: bool | None
) -> None:
    real_open, real_fsync = os.open, os.fsync

    def open_new_only(path: str, flags: int, *args: int) -> int:
        if os.path.isfile(path) and flags & (os.O_WRONLY | os.O_RDWR):
            fail()
        return real_open(path, flags, *args)

    def fsync_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not on this filesystem")
        real_fsync(descriptor)

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(os, "open", open_new_only)
    monkeypatch.setattr(os, "fsync", fsync_files_only)
    make_version_directory(tmp_path / "stream" / "weight_v000001")
    write_file(tmp_path / "stream" / "weight_v000001", "x", [b"12", b"345"], atomic_rename=atomic_rename)
    assert os.listdir(tmp_path / "stream" / "weight_v000001") == ["x"]
    assert (tmp_path / "stream" / "weight_v000001" / "x").read_bytes() == b"12345"


@renaming
def test_a_file_is_never_written_over(tmp_path: Path, atomic_rename: bool | None) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(PublishError, match="there already") as caught:
        write_file(tmp_path, "x", [b"new"], atomic_rename=atomic_rename)
    assert caught.value.path == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"old"


@renaming
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, atomic_rename: bool | None
) -> None:
    real = getattr(os, call)

    def out_of_space(descriptor: int, *args: object) -> object:
        if call == "close":
            real(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, out_of_space)
    with pytest.raises(PublishError, match="No space left on device") as caught:
        write_file(tmp_path, "x", [b"1"], atomic_rename=atomic_rename)
    monkeypatch.undo()
    assert caught.value.path == str(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_lost_names_are_an_error_where_directories_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fsync = os.fsync

    def io_error(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", io_error)
    with pytest.raises(PublishError, match="Input/output error"):
        write_file(tmp_path, "x", [b"1"], atomic_rename=True)
    assert os.listdir(tmp_path) == []
    write_file(tmp_path, "y", [b"1"], atomic_rename=False)


def test_a_rename_whose_answer_was_lost_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_rename = os.rename

    def rename_and_lose_the_answer(source: str, target: str) -> None:
        real_rename(source, target)
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "rename", rename_and_lose_the_answer)
    write_file(tmp_path, "x", [b"1"], atomic_rename=True)
    assert (tmp_path / "x").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["x"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:3]))
    assert write_file(tmp_path, "x", [b"0123456789", np.arange(4, dtype=np.uint16).view(np.uint8)]) == 18
    assert (tmp_path / "x").read_bytes() == b"0123456789\0\0\1\0\2\0\3\0"


@pytest.mark.parametrize(
    "entry",
    [
        ShardEntry(name="__metadata__", dtype="U8", shape=(1,), data=b"1"),
        ShardEntry(name="a", dtype="F32", shape=(1,), data=b"123"),
        ShardEntry(name="a", dtype="bfloat", shape=(1,), data=b"1"),
    ],
)
def test_a_shard_no_reader_would_take_is_not_written(tmp_path: Path, entry: ShardEntry) -> None:
    with pytest.raises(HeaderError):
        write_shard(tmp_path, "one.safetensors", [entry], {})
    assert os.listdir(tmp_path) == []


def test_the_version_directory_may_be_there_already(tmp_path: Path) -> None:
    for _ in range(2):
        make_version_directory(tmp_path / "stream" / "weight_v000001")
    assert (tmp_path / "stream" / "weight_v000001").is_dir()


def test_a_version_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "stream").write_bytes(b"a file")
    with pytest.raises(PublishError, match="cannot make") as caught:
        make_version_directory(tmp_path / "stream" / "weight_v000001")
    assert caught.value.path == str(tmp_path / "stream" / "weight_v000001")


def test_remove_file_says_whether_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"1")
    assert remove_file(tmp_path / "x")
    assert remove_file(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"1")
    monkeypatch.setattr(os, "unlink", fail)
    assert not remove_file(tmp_path / "x")
