"""The disk that forgets, itself: it loses what POSIX lets a filesystem lose, and nothing that was synced."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync.mirror import io
from support.forgetful_disk import PAGE_BYTES
from support.powerloss import Recorder

Tree = dict[str, bytes]
OLD, NEW = b"o", b"n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (root := tmp_path / "root").mkdir()
    (root / "data").write_bytes(OLD * 3 * PAGE_BYTES)
    (root / "state").write_bytes(OLD)
    return root


def outcomes(root: Path, protocol: Callable[[Path], None], *, at: int | None = None, count: int = 200) -> list[Tree]:
    """Trees that may be found when the power fails during `protocol`, or after its step `at`, or (-1) after its end."""
    recorder = Recorder(root)
    with io.observed(recorder):
        protocol(root)
    steps = len(recorder.log)
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        into = root.with_name(f"after {seed}")
        step = rng.randint(0, steps) if at is None else range(steps + 1)[at]
        recorder.disk_after(step).survive(into, rng)
        found.append({str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()})
    return found


def overwrite(root: Path, *, sync: bool) -> None:
    with io.WritableFile(root / "data", create=False) as file:
        file.write_at(NEW * 3 * PAGE_BYTES, 0)
        if sync:
            file.fsync()


def create(path: Path, data: bytes, *, sync: bool = True, sync_directory: bool = True) -> None:
    with io.WritableFile(path, create=True) as file:
        file.append(data)
        if sync:
            file.fsync()
    if sync_directory:
        io.fsync_directory(path.parent)


def replace(path: Path, data: bytes, *, sync: bool = True, sync_directory: bool = True) -> None:
    create(path.with_suffix(".tmp"), data, sync=sync, sync_directory=False)
    io.rename(path.with_suffix(".tmp"), path)
    if sync_directory:
        io.fsync_directory(path.parent)


def test_unsynced_pages_are_old_or_new_one_by_one_and_never_torn(root: Path) -> None:
    found = outcomes(root, lambda root: overwrite(root, sync=False), at=-1)
    pages = {tuple(tree["data"][at : at + PAGE_BYTES] for at in range(0, 3 * PAGE_BYTES, PAGE_BYTES)) for tree in found}
    assert len(pages) == 8
    assert {page for three in pages for page in three} == {OLD * PAGE_BYTES, NEW * PAGE_BYTES}


def test_synced_bytes_stay(root: Path) -> None:
    found = outcomes(root, lambda root: overwrite(root, sync=True), at=-1)
    assert {tree["data"] for tree in found} == {NEW * 3 * PAGE_BYTES}


def test_a_sync_in_progress_promises_nothing(root: Path) -> None:
    found = outcomes(root, lambda root: overwrite(root, sync=True), at=-2)
    assert len({tree["data"] for tree in found}) == 8


def test_a_page_written_twice_may_be_found_in_between(root: Path) -> None:
    def protocol(root: Path) -> None:
        with io.WritableFile(root / "data", create=False) as file:
            file.write_at(b"1" * PAGE_BYTES, 0)
            file.write_at(b"2" * PAGE_BYTES, 0)

    found = {tree["data"][:1] for tree in outcomes(root, protocol, at=-1)}
    assert found == {OLD, b"1", b"2"}


def test_a_longer_file_may_be_found_with_its_old_length_or_with_zeros(root: Path) -> None:
    def protocol(root: Path) -> None:
        with io.WritableFile(root / "data", create=False) as file:
            file.append(NEW * PAGE_BYTES)

    ends = {tree["data"][3 * PAGE_BYTES :] for tree in outcomes(root, protocol, at=-1)}
    assert ends == {b"", bytes(PAGE_BYTES), NEW * PAGE_BYTES}


def test_a_synced_file_may_lose_its_name_until_its_directory_is_synced(root: Path) -> None:
    found = outcomes(root, lambda root: create(root / "a", NEW, sync_directory=False), at=-1)
    assert {tree.get("a") for tree in found} == {None, NEW}
    found = outcomes(root, lambda root: create(root / "b", NEW), at=-1)
    assert {tree.get("b") for tree in found} == {NEW}


def test_a_synced_directory_is_lost_with_its_own_name(root: Path) -> None:
    def protocol(root: Path) -> None:
        with io._step("mkdir", root / "deep"):
            (root / "deep").mkdir()
        create(root / "deep" / "a", NEW)

    assert {tree.get("deep/a") for tree in outcomes(root, protocol, at=-1)} == {None, NEW}


def test_any_subset_of_names_may_be_lost(root: Path) -> None:
    def protocol(root: Path) -> None:
        create(root / "a", NEW, sync_directory=False)
        create(root / "b", NEW, sync_directory=False)
        io.unlink(root / "state")

    found = {tuple(name in tree for name in ("a", "b", "state")) for tree in outcomes(root, protocol, at=-1)}
    assert len(found) == 8


def test_a_rename_is_whole_or_not_at_all(root: Path) -> None:
    found = outcomes(root, lambda root: io.rename(root / "state", root / "moved"), at=-1)
    assert {("state" in tree, "moved" in tree) for tree in found} == {(True, False), (False, True)}


def test_the_same_seed_gives_the_same_tree(root: Path) -> None:
    recorder = Recorder(root)
    with io.observed(recorder):
        overwrite(root, sync=False)
        replace(root / "state", NEW, sync_directory=False)
    trees = []
    for name in ("one", "two"):
        recorder.disk_after(len(recorder.log)).survive(into := root.with_name(name), random.Random(5))
        trees.append([(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(into.iterdir())])
    assert trees[0] == trees[1]


def lies(tree: Tree) -> bool:
    """The state says that the data is new, and it is not; or one of them is gone."""
    return tree.get("state") != OLD and (tree.get("state"), tree.get("data")) != (NEW, NEW * 3 * PAGE_BYTES)


def data_then_state(root: Path) -> None:
    overwrite(root, sync=True)
    replace(root / "state", NEW)


def state_before_the_sync_of_the_data(root: Path) -> None:
    overwrite(root, sync=False)
    replace(root / "state", NEW)
    overwrite(root, sync=True)


def state_renamed_before_its_sync(root: Path) -> None:
    overwrite(root, sync=True)
    replace(root / "state", NEW, sync=False)


def state_written_in_place(root: Path) -> None:
    overwrite(root, sync=True)
    io.unlink(root / "state")
    create(root / "state", NEW)


def test_the_right_order_never_lies(root: Path) -> None:
    assert not any(map(lies, outcomes(root, data_then_state)))


@pytest.mark.parametrize(
    "protocol", [state_before_the_sync_of_the_data, state_renamed_before_its_sync, state_written_in_place]
)
def test_a_wrong_order_is_caught(root: Path, protocol: Callable[[Path], None]) -> None:
    assert any(map(lies, outcomes(root, protocol)))


def test_what_is_reported_without_a_sync_of_the_directory_is_lost(root: Path) -> None:
    found = outcomes(root, lambda root: replace(root / "state", NEW, sync_directory=False), at=-1)
    assert {tree["state"] for tree in found} == {OLD, NEW}
