"""Positional reads: exact, bounded, never short."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from gpusync.errors import HeaderError, SourceReadError, StreamError, VersionMissingError, Where
from gpusync.stream import BytesSource, FileRange, SourceFile

DATA = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 1), (0, len(DATA)), (255, 513), (len(DATA), 0)])
def test_reads_any_part(path: Path, offset: int, nbytes: int) -> None:
    with SourceFile(path) as file:
        assert (file.path, file.nbytes) == (path, len(DATA))
        assert file.read_at(offset, nbytes) == DATA[offset : offset + nbytes]
        for buffer in (bytearray(nbytes), np.full(nbytes, 0xA5, np.uint8), memoryview(bytearray(nbytes))):
            file.read_into(offset, buffer)
            assert bytes(buffer) == DATA[offset : offset + nbytes]


def test_reads_into_a_slice_only(path: Path) -> None:
    buffer = np.full(12, 0xA5, np.uint8)
    with SourceFile(path) as file:
        file.read_into(3, buffer[4:8])
    assert buffer.tolist() == [0xA5] * 4 + [3, 4, 5, 6] + [0xA5] * 4


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_goes_on_after_a_short_read(path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Network filesystems return less than was asked for, and Linux never more than 2 GiB."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:chunk]], offset))
    with SourceFile(path) as file:
        assert file.read_at(5, 1000) == DATA[5:1005]


def test_file_that_ends_too_early(path: Path) -> None:
    with SourceFile(path, where=Where(version=7)) as file:
        os.truncate(path, 100)
        buffer = bytearray(b"\xa5" * 50)
        with pytest.raises(HeaderError) as caught:
            file.read_into(80, buffer, where=Where(path=path, version=7, tensor="w"))
    error = caught.value
    assert (error.path, error.version, error.tensor) == (str(path), 7, "w")
    assert (error.expected, error.found) == (130, 100)


def test_where_of_the_file_is_told(path: Path) -> None:
    with SourceFile(path, where=Where(version=7)) as file, pytest.raises(HeaderError) as caught:
        file.read_at(len(DATA), 1)
    assert (caught.value.path, caught.value.version) == (str(path), 7)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(VersionMissingError) as caught:
        SourceFile(tmp_path / "absent", where=Where(version=7))
    assert (caught.value.path, caught.value.version) == (str(tmp_path / "absent"), 7)


def test_path_through_a_file(path: Path) -> None:
    with pytest.raises(SourceReadError) as caught:
        SourceFile(path / "x")
    assert caught.value.found == "Not a directory"


def test_links_need_an_opt_in(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StreamError) as caught:
        SourceFile(link)
    assert caught.value.found == "a symbolic link"
    with SourceFile(link, follow_links=True) as file:
        assert (file.path, file.read_at(0, 3)) == (link, DATA[:3])


def test_link_put_in_place_after_the_look(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open itself refuses a link, not only the look before it."""
    link = tmp_path / "link"
    link.symlink_to(path)
    monkeypatch.setattr(os, "stat", lambda name, *, follow_symlinks=True: os.lstat(path))
    with pytest.raises(StreamError) as caught:
        SourceFile(link)
    assert caught.value.found == "a symbolic link"


def test_fifo_put_in_place_after_the_look(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setattr(os, "stat", lambda name, *, follow_symlinks=True: os.lstat(path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StreamError) as caught:
        SourceFile(fifo)
    assert caught.value.found == "a FIFO"
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_twice(path: Path) -> None:
    file = SourceFile(path)
    file.close()
    file.close()
    with pytest.raises(SourceReadError):
        file.read_at(0, 1)


def test_descriptor_is_not_inherited(path: Path) -> None:
    """An engine that a trainer starts meanwhile must not keep a shard open: some mounts cannot be refreshed then."""
    with SourceFile(path):
        fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
        assert len(fds) == 1
        assert not os.get_inheritable(fds[0])


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize(
    ("offset", "nbytes", "inside"),
    [(0, 100, True), (99, 1, True), (100, 0, True), (0, 101, False), (100, 1, False), (-1, 1, False)],
)
def test_range_has_bounds(path: Path, kind: str, offset: int, nbytes: int, inside: bool) -> None:
    """Bytes beside the range belong to another tensor."""
    with SourceFile(path) as file:
        source = (
            FileRange(file, offset=10, nbytes=100, where=Where(tensor="w"))
            if kind == "file"
            else BytesSource(DATA[10:110], where=Where(tensor="w"))
        )
        assert source.nbytes == 100
        buffer = bytearray(b"\xa5" * nbytes)
        if inside:
            source.read_into(offset, buffer)
            assert buffer == DATA[10 + offset : 10 + offset + nbytes]
        else:
            with pytest.raises(HeaderError) as caught:
                source.read_into(offset, buffer)
            assert caught.value.tensor == "w"
            assert buffer == b"\xa5" * nbytes


@pytest.mark.parametrize(("offset", "nbytes"), [(0, len(DATA) + 1), (len(DATA), 1), (-1, 1), (5, -1)])
def test_range_lies_within_its_file(path: Path, offset: int, nbytes: int) -> None:
    with SourceFile(path) as file, pytest.raises(HeaderError) as caught:
        FileRange(file, offset=offset, nbytes=nbytes, where=Where(tensor="w", version=2))
    assert (caught.value.tensor, caught.value.version, caught.value.path) == ("w", 2, str(path))


def test_empty_sources() -> None:
    source = BytesSource(b"")
    source.read_into(0, bytearray())
    source.read_into(0, np.empty(0, np.uint8))
    assert source.nbytes == BytesSource(np.empty(0, np.uint8)).nbytes == 0


def test_threads_share_a_descriptor(path: Path) -> None:
    wrong: list[int] = []
    with SourceFile(path) as file:

        def read(start: int) -> None:
            for offset in range(start, 9000, 7):
                if file.read_at(offset, 300) != DATA[offset : offset + 300]:
                    wrong.append(offset)

        threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
