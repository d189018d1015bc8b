"""A disk that is full, read-only or broken, at every call to the system: a clear error, and nothing lost by it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from gpusync.errors import GpusyncError, MirrorError, SourceReadError
from gpusync.mirror.verify import verify_directory
from support.checkpoints import State, snapshot, tensor
from support.faults import CHANGES, READS, WRITES, Call, Filesystem, always, from_then_on, once
from support.streams import LEFTOVERS, Stream, check_local, said_version, write_stream

BEFORE, TARGET, NEWEST = 1, 3, 4
Outcome = tuple[Filesystem, BaseException | None]
# A note and a report for others: a pull does not fail for them.
DISPENSABLE = ("local/.weight_sync/lock.json", "local/.weight_sync/last_report.json")
# The lock makes sure of its directory and tries out what can be locked there; it knows other ways.
TRIED_BY_THE_LOCK = (Call("mkdir", "local/.weight_sync"), Call("open for writing", "local/.weight_sync"))


def three_tensors() -> State:
    rng = np.random.default_rng(7)
    return {
        "a.weight": tensor(rng, "BF16", 90, 100),
        "b.weight": tensor(rng, "F32", 40, 50),
        "b.codes": tensor(rng, "F8_E4M3", 101),
    }


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    return {
        kind: write_stream(tmp_path_factory.mktemp(kind), kind, three_tensors(), count=NEWEST)
        for kind in ("xor", "full")
    }


@dataclass
class Bench:
    """A local directory at version 1, or none; pulls of version 3 on a filesystem that fails."""

    root: Path
    stream: Stream
    start: Path | None

    @property
    def local(self) -> Path:
        return self.root / "local"

    def reset(self) -> dict[str, bytes]:
        shutil.rmtree(self.local, ignore_errors=True)
        if self.start is None:
            return {}
        shutil.copytree(self.start, self.local)
        return snapshot(self.local)

    def pull(
        self, fails: Callable[[Call, int], int | None], **options: object
    ) -> tuple[Filesystem, BaseException | None]:
        """The filesystem as it was used, and what came out of the pull: nothing, or an error."""
        disk = Filesystem(self.root, fails)
        try:
            with disk.watched():
                self.stream.pull(self.local, TARGET, **options)()
        except Exception as error:  # noqa: BLE001 - which kinds are right is what is tested
            return disk, error
        return disk, None

    def calls(self) -> list[Call]:
        self.reset()
        return self.pull(lambda _call, _number: None)[0].calls

    def check_failed(self, error: BaseException | None, before: dict[str, bytes], note: str) -> None:
        """The error is ours and names a file. The old version stands, or the move was decided and is not finished."""
        assert isinstance(error, (MirrorError, SourceReadError)), f"{note}: {error!r}"
        assert error.path is not None, note
        assert Path(error.path).is_relative_to(self.root), f"{note}: {error}"
        version = said_version(self.local)
        if (self.local / ".weight_sync" / "journal.json").exists() or version == TARGET:
            return
        assert version == (None if self.start is None else BEFORE), note
        assert (snapshot(self.local) if self.local.exists() else {}) == before, note
        if version is not None:
            assert verify_directory(self.local).damage is None, note

    def check_recovers(self, note: str) -> None:
        """The next pull, on a filesystem that works, completes what was begun and goes on."""
        self.stream.pull(self.local, NEWEST)()
        check_local(self.local, self.stream, NEWEST, note)


@pytest.fixture(params=["xor", "fresh", "full"])
def bench(request, streams, no_waiting, tmp_path: Path) -> Bench:
    """A fold in place; a seed into nothing; a full version that replaces what is there."""
    (root := tmp_path / "disk").mkdir()
    stream = streams["full" if request.param == "full" else "xor"]
    if request.param == "fresh":
        return Bench(root, stream, None)
    stream.pull(tmp_path / "start", BEFORE)()
    return Bench(root, stream, tmp_path / "start")


def distinct(calls: list[Call], names: frozenset[str]) -> Iterator[tuple[int, Call]]:
    """The first and the last call of each kind on each file."""
    for call in dict.fromkeys(calls):
        if call.name in names:
            numbers = [number for number, each in enumerate(calls) if each == call]
            yield from ((number, call) for number in sorted({numbers[0], numbers[-1]}))


def is_dispensable(call: Call) -> bool:
    return call.path.startswith(DISPENSABLE) or call in TRIED_BY_THE_LOCK


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_full_disk(bench: Bench, stays: bool) -> None:
    tried = set()
    for number, call in distinct(bench.calls(), WRITES):
        before = bench.reset()
        fails = from_then_on(number, errno.ENOSPC, WRITES) if stays else once(number, errno.ENOSPC)
        disk, error = bench.pull(fails)
        note = f"disk full at {call}"
        if error is None:
            assert all(map(is_dispensable, disk.failed)), note
        else:
            bench.check_failed(error, before, note)
            assert isinstance(error, MirrorError)
            assert "No space left on device" in str(error), note
            assert str(error.expected).startswith("room for "), note
            assert str(error.found).endswith("bytes free"), note
            if call.name == "pwrite":
                assert int(str(error.expected).split()[2]) > 0, note
        bench.check_recovers(note)
        tried.add(call.name)
    assert tried >= {"pwrite", "create", "rename"}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=["EIO", "EACCES"])
def test_a_call_that_fails_once(bench: Bench, code: int) -> None:
    names = CHANGES | READS | {"fsync", "open", "list"} if code == errno.EIO else CHANGES | {"open", "list"}
    tried = set()
    for number, call in distinct(bench.calls(), frozenset(names)):
        before = bench.reset()
        disk, error = bench.pull(once(number, code))
        note = f"{os.strerror(code)} at {call}"
        assert disk.failed, note
        if error is None:
            assert is_dispensable(call) or is_last_report(disk, number), note
        else:
            bench.check_failed(error, before, note)
        bench.check_recovers(note)
        tried.add(call.name)
    assert tried >= {"pwrite", "fsync", "open"} or code == errno.EACCES


def is_last_report(disk: Filesystem, number: int) -> bool:
    """The sync of the directory after the report was renamed."""
    return any(is_dispensable(call) for call in disk.calls[number - 3 : number])


def test_a_call_that_fails_once_leaves_nothing_prepared(bench: Bench) -> None:
    """Before the decision: what takes room is gone when the error is raised, and no file stays open."""
    for number, call in distinct(bench.calls(), WRITES | {"fsync"}):
        bench.reset()
        before = set(os.listdir("/proc/self/fd"))
        _, error = bench.pull(once(number, errno.EIO))
        note = f"EIO at {call}: {error}"
        assert set(os.listdir("/proc/self/fd")) == before, note
        if error is not None and not (bench.local / ".weight_sync" / "journal.json").exists():
            left = [name for name in LEFTOVERS if (bench.local / ".weight_sync" / name).exists()]
            assert not left, f"{note}; left: {left}"
        del error


def test_a_read_only_filesystem(bench: Bench) -> None:
    before = bench.reset()
    disk, error = bench.pull(always(errno.EROFS, CHANGES))
    bench.check_failed(error, before, "read-only")
    assert "Read-only file system" in str(error)
    assert disk.failed
    bench.check_recovers("read-only")


def test_a_broken_stream(bench: Bench, streams) -> None:
    """EIO while the stream or the base is read: as clear, and nothing has changed."""
    elsewhere = bench.root / "published"
    shutil.copytree(bench.stream.source.parent, elsewhere)
    bench.stream = replace(bench.stream, base=elsewhere / "base", source=elsewhere / "stream")
    calls = [(n, c) for n, c in distinct(bench.calls(), READS | {"open"}) if c.path.startswith("published")]
    assert len(calls) > 10
    for number, call in calls:
        before = bench.reset()
        _, error = bench.pull(once(number, errno.EIO))
        note = f"EIO at {call}"
        bench.check_failed(error, before, note)
        assert said_version(bench.local) == (None if bench.start is None else BEFORE), note
        assert Path(str(error.path)).is_relative_to(elsewhere), f"{note}: {error}"
    bench.check_recovers("broken stream")


class TestDecided:
    """After the journal stands, the move is completed by whatever pull comes next, as soon as it can."""

    def test_a_smaller_target_does_not_undo_it(self, streams, no_waiting, tmp_path: Path) -> None:
        stream = streams["xor"]
        (root := tmp_path / "disk").mkdir()
        stream.pull(tmp_path / "start", BEFORE)()
        bench = Bench(root, stream, tmp_path / "start")
        number = next(
            n for n, call in enumerate(bench.calls()) if str(call) == "pwrite local/.weight_sync/state.json.tmp"
        )
        bench.reset()
        _, error = bench.pull(once(number, errno.ENOSPC))
        assert isinstance(error, MirrorError)
        with pytest.raises(GpusyncError, match="behind"):
            stream.pull(bench.local, BEFORE)()
        check_local(bench.local, stream, TARGET, "after a refused pull")

    def test_it_is_tried_again_until_there_is_room(self, streams, no_waiting, tmp_path: Path) -> None:
        stream = streams["xor"]
        (root := tmp_path / "disk").mkdir()
        stream.pull(tmp_path / "start", BEFORE)()
        bench = Bench(root, stream, tmp_path / "start")
        first = bench.calls().index(Call("create", "local/.weight_sync/checksums.json.tmp"))
        bench.reset()
        for attempt in range(3):
            no_new_file = from_then_on(first if attempt == 0 else 0, errno.ENOSPC, frozenset({"create"}))
            _, error = bench.pull(no_new_file)
            assert isinstance(error, MirrorError)
            assert "checksums.json.tmp" in str(error.path)
            assert (bench.local / ".weight_sync" / "journal.json").exists()
        bench.check_recovers("at last there is room")
