"""Names in an index and kinds of files: nothing leads out of a version's directory, nothing but a file is read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync.errors import HeaderError, IndexFormatError, StreamError, VersionMissingError
from gpusync.stream import list_versions, read_index, read_version

Refused = Callable[..., Exception]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "/dev/zero",
        "/etc/x.safetensors",
        "../x.safetensors",
        "../../outside.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "./x.safetensors",
        "x\0.safetensors",
        "x.safetensors\0",
        "x.safetensors/",
        "",
        ".",
        "..",
        ".weight_sync",
        "config.json",
        "model.safetensors.index.json",
        "x" * 244 + ".safetensors",
        "é" * 122 + "a.safetensors",
    ],
)
@pytest.mark.parametrize("key", ["weight_map", "shard_bytes"])
def test_file_name_that_is_not_plain(draft, refused: Refused, name: str, key: str) -> None:
    if key == "weight_map":
        draft.weight_map["c.weight"] = name
    else:
        draft.metadata["shard_bytes"] = {name: 1}
    error = refused(IndexFormatError, expected="*.safetensors", text=key)
    assert str(error.found).startswith(name[:100])


@pytest.mark.parametrize("name", [None, 7, True, [FIRST], {FIRST: FIRST}])
def test_file_name_that_is_no_text(draft, refused: Refused, name: object) -> None:
    draft.weight_map["c.weight"] = name
    refused(IndexFormatError, text="weight_map")


def test_longest_file_name_is_taken(draft) -> None:
    name = "é" * 121 + "a.safetensors"
    assert len(name.encode()) == 255
    draft.headers[name], draft.data[name] = draft.headers.pop(SECOND), draft.data.pop(SECOND)
    draft.weight_map["c.weight"] = name
    draft.write()
    assert read_version(draft.source_dir, 1).tensors["c.weight"].file == name


@pytest.mark.parametrize("inside", [True, False])
def test_shard_that_is_a_link(draft, refused: Refused, tmp_path: Path, inside: bool) -> None:
    """A link is refused wherever it leads; following links takes an opt-in."""
    draft.write()
    shard = draft.directory / SECOND
    target = draft.directory / "other.bin" if inside else tmp_path / "outside.bin"
    shard.rename(target)
    shard.symlink_to(target)
    refused(StreamError, write=False, path=shard, expected="a regular file", found="a symbolic link")
    assert len(read_version(draft.source_dir, 1, follow_links=True).tensors) == 3


def test_dangling_link_is_an_error_even_to_who_follows(draft, refused: Refused) -> None:
    draft.write()
    shard = draft.directory / SECOND
    shard.unlink()
    shard.symlink_to("nowhere")
    refused(StreamError, write=False, path=shard, found="a symbolic link")
    with pytest.raises(VersionMissingError):
        read_version(draft.source_dir, 1, follow_links=True)


def test_link_to_itself_ends(draft, refused: Refused) -> None:
    draft.write()
    shard = draft.directory / SECOND
    shard.unlink()
    shard.symlink_to(SECOND)
    with pytest.raises(StreamError) as caught:
        read_version(draft.source_dir, 1, follow_links=True)
    assert (caught.value.path, caught.value.version) == (str(shard), 1)


def test_index_that_is_a_link(draft, refused: Refused, tmp_path: Path) -> None:
    draft.write()
    draft.index_path.rename(tmp_path / "index.json")
    draft.index_path.symlink_to(tmp_path / "index.json")
    refused(StreamError, write=False, found="a symbolic link")


def test_version_directory_that_is_a_link(draft, refused: Refused, tmp_path: Path) -> None:
    draft.write()
    draft.directory.rename(tmp_path / "elsewhere")
    draft.directory.symlink_to(tmp_path / "elsewhere")
    refused(StreamError, write=False, path=draft.directory, expected="a directory", found="a symbolic link")
    assert read_index(draft.source_dir, 1, follow_links=True).version == 1


def test_version_directory_that_is_a_file(draft, refused: Refused) -> None:
    draft.source_dir.mkdir()
    draft.directory.write_bytes(b"")
    refused(StreamError, write=False, path=draft.directory, expected="a directory")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # the whole path may be too long for a socket's name
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device node takes privileges that this process lacks")


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device, Path.mkdir])
@pytest.mark.parametrize("what", ["shard", "index"])
def test_special_file_is_neither_read_nor_waited_for(
    draft, refused: Refused, make: Callable[[Path], None], what: str
) -> None:
    draft.write()
    path = draft.directory / SECOND if what == "shard" else draft.index_path
    path.unlink()
    make(path)
    start = time.monotonic()
    refused(StreamError, write=False, path=path, expected="a regular file")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "name", ["модель.слой.0.вес", "層.0.重み", "\U0001f999.weight", "a b", "a/../b", "\u0000", "\r\n", "", "n" * 4096]
)
def test_any_unicode_tensor_name_is_taken(draft, name: str) -> None:
    draft.weight_map[name] = draft.weight_map.pop("c.weight")
    draft.headers[SECOND] = {"__metadata__": {name: "0" * 32}, name: draft.headers[SECOND]["c.weight"]}
    draft.write()
    stored = read_version(draft.source_dir, 1).tensors[name]
    assert (stored.name, stored.nbytes, stored.checksum) == (name, 7, "0" * 32)


def test_control_characters_of_a_name_do_not_break_the_message(draft, refused: Refused) -> None:
    draft.weight_map["x\n2026 ERROR forged"] = FIRST
    refused(IndexFormatError, path=draft.directory / FIRST, tensor="x\n2026 ERROR forged", text="x\\n2026")


@pytest.mark.parametrize("name", ["n" * 4097, "é" * 2049, "__metadata__"])
def test_tensor_name_out_of_bounds_in_the_index(draft, refused: Refused, name: str) -> None:
    draft.weight_map[name] = FIRST
    refused(IndexFormatError, tensor=name)


def test_tensor_name_out_of_bounds_in_a_header(draft, refused: Refused) -> None:
    name = "é" * 2049
    draft.headers[SECOND][name] = draft.headers[SECOND].pop("c.weight")
    refused(HeaderError, path=draft.directory / SECOND, tensor=name)


@pytest.mark.parametrize("surrogate", ["\\ud800", "\\uDFFF", "\\udc00\\ud800"])
def test_lone_surrogates(draft, refused: Refused, surrogate: str) -> None:
    """No file system, log or socket takes such a name; it must fail here, and not with a UnicodeEncodeError there."""
    draft.write()
    shard = draft.directory / SECOND
    raw = shard.read_bytes()
    text = raw[8:-7].replace(b'"c.weight"', f'"c.{surrogate}"'.encode())
    shard.write_bytes(len(text).to_bytes(8, "little") + text + b"payload")
    refused(HeaderError, write=False, path=shard, text="not Unicode")

    draft.write_index(draft.index_path.read_bytes().replace(b'"c.weight"', f'"c.{surrogate}"'.encode()))
    refused(IndexFormatError, write=False, text="not Unicode")


def test_surrogate_pair_is_one_character(draft) -> None:
    draft.weight_map["\U0001f999"] = draft.weight_map.pop("c.weight")
    draft.headers[SECOND] = {"__metadata__": {"\U0001f999": "0" * 32}, "\U0001f999": draft.headers[SECOND]["c.weight"]}
    draft.write()
    assert b"\\ud83e\\udd99" in draft.index_path.read_bytes()
    assert "\U0001f999" in read_version(draft.source_dir, 1).tensors


def test_versions_are_listed_by_canonical_name_only(draft) -> None:
    names = ["weight_v000002", "weight_v1000000", "weight_v999999", "weight_v000000"]
    others = [
        "weight_v2",
        "weight_v0000003",
        "weight_v00000x",
        "weight_v-00001",
        "xweight_v000004",
        "weight_v000005.tmp",
    ]
    others += ["weight_v٠٠٠٠٠١", "weight_v000006\n", "weight_v9999999999999", "weight_v12345678901234"]
    for name in names + others:
        (draft.source_dir / name).mkdir(parents=True)
    assert list_versions(draft.source_dir) == [0, 2, 999999, 1000000]
