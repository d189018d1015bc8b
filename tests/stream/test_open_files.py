"""The cache of open files: bounded, shared, and no deadlock at its bound."""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpusync.errors import HeaderError, SourceReadError, StreamError, VersionMissingError, Where
from gpusync.stream import OpenFiles, SourceFile
from gpusync.stream import open_files as module


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i}.bin" for i in range(12)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 64)
    return paths


def open_fds(paths: list[Path]) -> int:
    names = {str(path) for path in paths}
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}") in names
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return count


def test_a_file_is_opened_once(paths: list[Path]) -> None:
    with OpenFiles() as files:
        with files.open(paths[0]) as first:
            pass
        with files.open(str(paths[0])) as again, files.open(paths[0]) as nested:
            assert first is again is nested
        assert open_fds(paths) == 1
    assert open_fds(paths) == 0


def test_least_recently_used_goes_first(paths: list[Path]) -> None:
    with OpenFiles(2) as files:
        for i in (0, 1, 0, 2):
            with files.open(paths[i]) as file:
                assert file.read_at(0, 1) == bytes([i])
            assert open_fds(paths) <= 2
        assert (open_fds([paths[0]]), open_fds([paths[1]]), open_fds([paths[2]])) == (1, 0, 1)


def test_what_is_in_use_is_never_closed(paths: list[Path]) -> None:
    with OpenFiles(2) as files, files.open(paths[0]) as held:
        for path in paths[1:]:
            with files.open(path):
                assert held.read_at(0, 64) == bytes(64)
        assert open_fds(paths) == 2


def test_ranges_are_not_bounded(paths: list[Path]) -> None:
    """A chain of more shards than there are descriptors: all payloads of a tensor are open at once."""
    with OpenFiles(2) as files, ExitStack() as stack:
        ranges = [stack.enter_context(files.open_range(path, offset=8, nbytes=16)) for path in paths]
        for _ in range(2):
            for i, source in enumerate(ranges):
                buffer = bytearray(16)
                source.read_into(0, buffer)
                assert (buffer, source.nbytes) == (bytes([i]) * 16, 16)
                assert open_fds(paths) <= 2


class CountedFile(SourceFile):
    """Knows how many are open, and how many there ever were at once; a file that is being opened counts."""

    lock = threading.Lock()
    count = peak = 0

    def __init__(self, path: str, **options: Any) -> None:
        with self.lock:
            CountedFile.count += 1
            CountedFile.peak = max(CountedFile.peak, CountedFile.count)
        super().__init__(path, **options)

    def close(self) -> None:
        super().close()
        with self.lock:
            CountedFile.count -= 1


def test_threads_stay_within_the_bound(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than places: each waits for one, none for ever, and the bound holds at every moment."""
    monkeypatch.setattr(module, "SourceFile", CountedFile)
    wrong: list[object] = []
    with OpenFiles(2) as files:

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(150):
                i = chance.randrange(len(paths))
                with files.open_range(paths[i], offset=0, nbytes=64) as source:
                    buffer = bytearray(64)
                    source.read_into(0, buffer)
                    if buffer != bytes([i]) * 64:
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert (CountedFile.peak, CountedFile.count) == (2, 0)
    assert open_fds(paths) == 0


def test_thread_that_holds_a_file_does_not_wait_for_itself(paths: list[Path]) -> None:
    with OpenFiles(1) as files:
        with files.open(paths[0]), pytest.raises(SourceReadError) as caught, files.open(paths[1]):
            pass
        assert (caught.value.path, caught.value.expected) == (str(paths[1]), 1)
        with files.open(paths[1]) as file:
            assert file.read_at(0, 1) == b"\1"


def test_two_threads_open_the_same_file_once(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first's open; when that fails, it tries for itself."""
    first_is_opening, go_on = threading.Event(), threading.Event()
    real = module.SourceFile
    opened: list[str] = []

    def slow(path: str, **options: object) -> object:
        opened.append(path)
        if len(opened) == 1:
            first_is_opening.set()
            go_on.wait(30)
            raise SourceReadError("read failed", path=path)
        return real(path, follow_links=False)

    monkeypatch.setattr(module, "SourceFile", slow)
    results: list[object] = []

    def use() -> None:
        try:
            with files.open(paths[0]) as file:
                results.append(file.read_at(0, 1))
        except SourceReadError as error:
            results.append(error.what)

    with OpenFiles(1) as files:
        threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
        threads[0].start()
        assert first_is_opening.wait(30)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(30)
    assert sorted(map(str, results)) == [str(b"\0"), "read failed"]
    assert len(opened) == 2


def test_failed_open_leaves_no_trace(paths: list[Path], tmp_path: Path) -> None:
    with OpenFiles(1) as files:
        for _ in range(3):
            with pytest.raises(VersionMissingError), files.open(tmp_path / "absent", where=Where(version=4)):
                pass
        with files.open(paths[3]) as file:
            assert file.read_at(0, 1) == b"\3"


def test_follow_links_is_asked_for_each_time(paths: list[Path], tmp_path: Path) -> None:
    """That one caller may follow a link does not mean that the next one may."""
    link = tmp_path / "link"
    link.symlink_to(paths[5])
    with OpenFiles() as files:
        with files.open(link, follow_links=True) as file:
            assert file.read_at(0, 1) == b"\5"
        with pytest.raises(StreamError), files.open(link):
            pass


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (64, 1), (-1, 2), (0, -1)])
def test_range_out_of_its_file(paths: list[Path], offset: int, nbytes: int) -> None:
    place = Where(version=4, tensor="w")
    with (
        OpenFiles() as files,
        pytest.raises(HeaderError) as caught,
        files.open_range(paths[0], offset=offset, nbytes=nbytes, where=place),
    ):
        pass
    assert (caught.value.path, caught.value.version, caught.value.tensor) == (str(paths[0]), 4, "w")


def test_close_waits_for_what_is_in_use(paths: list[Path]) -> None:
    files = OpenFiles()
    with files.open(paths[0]) as held:
        with files.open(paths[1]):
            pass
        files.close()
        assert held.read_at(0, 64) == bytes(64)
        assert open_fds(paths) == 1
    assert open_fds(paths) == 0
    files.close()
    with pytest.raises(ValueError, match="closed"), files.open(paths[0]):
        pass


def test_bound_of_nothing() -> None:
    with pytest.raises(ValueError, match="room"):
        OpenFiles(0)
