"""Pruning a stream: what goes is gone, at every moment nothing is half published, and nobody misses anything."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import gpusync.publish.removal
from gpusync.errors import IndexFormatError, MissingLinkError, PublishError, StreamError, VersionMissingError
from gpusync.publish import Publisher, prune_stream
from gpusync.publish.removal import WITHDRAWN_INDEX_NAME, remove_version
from gpusync.stream import INDEX_NAME, list_versions, read_version
from support.checkpoints import State, changed, encode_shard, write_checkpoint
from support.receiver import receive
from support.slime import publish_delta, publish_full, version_dir


@pytest.fixture
def states(site, offer) -> list[State]:
    """Seven versions; the fourth is full."""
    states = [site.state]
    publisher = Publisher(site.source, base_dir=site.base, full_every=4, shard_bytes=5000)
    for version in range(1, 8):
        states.append(changed(states[-1], version))
        publisher.publish(offer(states[-1]))
    return states


def tree(source: Path) -> list[str]:
    return sorted(str(path.relative_to(source)) for path in source.rglob("*"))


def test_old_versions_go_and_everybody_reaches_the_newest(site, offer, states) -> None:
    site.pull(2)
    lagging = site.local.with_name("lagging")
    shutil.copytree(site.local, lagging)
    size = sum(p.stat().st_size for v in (1, 2, 3) for p in version_dir(site.source, v).glob("*.safetensors"))
    report = prune_stream(site.source, keep_last=2)
    assert (report.removed, report.finished, report.left, report.freed_bytes) == ((3, 2, 1), (), {}, size)
    assert report.kept == {4: "needed", 5: "needed", 6: "newest", 7: "newest"}
    assert list_versions(site.source) == [4, 5, 6, 7]
    assert receive(site.state, site.source, 7) == states[7]
    # One that lagged, a fresh one, and one at a version that is kept.
    assert site.pull(7).seed == "full"
    assert site.local_state() == states[7]
    shutil.rmtree(site.local)
    assert site.pull(5).seed_version == 4
    assert site.pull(7).seed == "store"
    assert site.local_state() == states[7]
    with pytest.raises(VersionMissingError):
        site.pull(3, allow_rewind=True)


@pytest.mark.parametrize("keep_snapshot", [True, False])
def test_a_publisher_goes_on_with_a_pruned_stream(site, offer, keep_snapshot) -> None:
    """Full anchors and a prune after every version: one at work, and one that starts anew, with and without a base."""
    states = [site.state]
    publisher = Publisher(site.source, base_dir=site.base, full_every=3, keep_snapshot=keep_snapshot)
    for version in range(1, 9):
        states.append(changed(states[-1], version, names=["step", "layer.0.weight"] if version % 2 else None))
        publisher.publish(offer({name: t for name, t in states[-1].items() if version % 2 == 0 or name in "step"}))
        states[-1] = {**states[-2], "step": states[-1]["step"]} if version % 2 else states[-1]
        prune_stream(site.source, keep_last=2, keep_full_every=6)
    assert list_versions(site.source) == [3, 6, 7, 8]
    assert receive(site.state, site.source, 8) == states[8]
    shutil.rmtree(site.local, ignore_errors=True)
    assert site.pull(8).seed_version == 6
    assert site.local_state() == states[8]
    for base in (site.base, None):
        publisher = Publisher(site.source, base_dir=base, resume=True, keep_snapshot=keep_snapshot)
        states.append(changed(states[-1], publisher.version + 1))
        publisher.publish(offer(states[-1]))
        assert receive(site.state, site.source, publisher.version) == states[-1]


def test_a_dry_run_changes_nothing_and_says_the_same(site, states) -> None:
    before = tree(site.source)
    dry = prune_stream(site.source, keep_last=1, dry_run=True)
    assert tree(site.source) == before
    done = prune_stream(site.source, keep_last=1)
    assert dry.dry_run
    assert (dry.kept, dry.removed, dry.freed_bytes) == (done.kept, done.removed, done.freed_bytes)


def test_a_stream_without_a_full_version_keeps_everything(site) -> None:
    states = [site.state]
    for version in range(1, 5):
        states.append(changed(states[-1], version))
        publish_delta(site.source, version, states[-2], states[-1])
    assert prune_stream(site.source, keep_last=1).removed == ()
    site.pull(4)
    assert site.local_state() == states[4]


def test_a_full_version_with_its_side_files_goes(site) -> None:
    publish_full(site.source, 1, site.state, files={"tokenizer.json": "{}", "merges.txt": "", "chat.jinja": ""})
    publish_full(site.source, 2, site.state)
    assert prune_stream(site.source, keep_last=1).left == {}
    assert list_versions(site.source) == [2]


def test_what_is_not_ours_stays_with_its_directory(site, states) -> None:
    outside = site.base / "config.json"
    first = version_dir(site.source, 1)
    (first / "notes.txt").write_text("mine")
    (first / "strange.safetensors").write_text("mine")
    (first / "sub").mkdir()
    (first / "link.json").symlink_to(outside)
    for name in ("delta-00000-of-00001-0123456789ab-00001.safetensors", f".{INDEX_NAME}.0123456789ab.tmp"):
        (first / name).write_text("of an attempt that died")
    report = prune_stream(site.source, keep_last=2)
    assert report.left == {str(first): ("link.json", "notes.txt", "strange.safetensors", "sub")}
    assert tree(first) == [WITHDRAWN_INDEX_NAME, "link.json", "notes.txt", "strange.safetensors", "sub"]
    # It is said again until somebody has looked.
    again = prune_stream(site.source, keep_last=2)
    assert (again.removed, again.finished, again.left) == ((1,), (1,), report.left)
    for path in (first / "notes.txt", first / "strange.safetensors", first / "link.json"):
        path.unlink()
    (first / "sub").rmdir()
    assert prune_stream(site.source, keep_last=2).left == {}
    assert not first.exists()
    assert outside.exists()


def test_links_are_not_followed(site, states) -> None:
    """Neither a version directory that is a link, nor a shard that is one."""
    elsewhere = site.source.with_name("elsewhere")
    shutil.move(version_dir(site.source, 1), elsewhere)
    version_dir(site.source, 1).symlink_to(elsewhere)
    before = tree(elsewhere)
    with pytest.raises(StreamError, match="not a directory"):
        prune_stream(site.source, keep_last=1)
    with pytest.raises((PublishError, StreamError)):
        remove_version(site.source, 1)
    assert tree(elsewhere) == before
    version_dir(site.source, 1).unlink()
    shard = next(version_dir(site.source, 2).glob("*.safetensors"))
    shutil.move(shard, elsewhere / "shard")
    shard.symlink_to(elsewhere / "shard")
    prune_stream(site.source, keep_last=1)
    assert list_versions(site.source) == [4, 5, 6, 7]
    assert (elsewhere / "shard").exists()


def test_what_is_not_published_is_not_touched(site, states) -> None:
    """A publisher at work: above the newest version, or anywhere with files of its own and no index yet."""
    for version in (8, 9):
        version_dir(site.source, version).mkdir()
    shard = "delta-00000-of-00001-0123456789ab-00001.safetensors"
    (version_dir(site.source, 9) / shard).write_text("half")
    (version_dir(site.source, 1) / INDEX_NAME).unlink()
    before = [*tree(version_dir(site.source, 9)), *tree(version_dir(site.source, 1))]
    assert prune_stream(site.source, keep_last=1).removed == (3, 2)
    assert [*tree(version_dir(site.source, 9)), *tree(version_dir(site.source, 1))] == before
    assert version_dir(site.source, 8).exists()


def test_nothing_goes_when_what_stays_is_not_there_in_full(site, states) -> None:
    """An anchor whose shard is cut would carry nobody."""
    shard = next(version_dir(site.source, 4).glob("*.safetensors"))
    whole = shard.read_bytes()
    before = tree(site.source)
    shard.write_bytes(whole[:-1])
    with pytest.raises(VersionMissingError) as caught:
        prune_stream(site.source, keep_last=1)
    assert caught.value.version == 4
    shard.write_bytes(whole)
    index = version_dir(site.source, 2) / INDEX_NAME
    told = index.read_text()
    index.write_text("{")
    with pytest.raises(IndexFormatError):
        prune_stream(site.source, keep_last=1)
    index.write_text(told)
    assert tree(site.source) == before


def test_nothing_below_a_gap_goes(site, states) -> None:
    shutil.rmtree(version_dir(site.source, 6))
    assert prune_stream(site.source, keep_last=1).removed == ()
    with pytest.raises(MissingLinkError):
        site.pull(7)


def test_a_stream_that_is_not_there(site) -> None:
    with pytest.raises(VersionMissingError):
        prune_stream(site.source / "nowhere", keep_last=1)


class Stopped(BaseException):
    """The process dies here."""


class Dying:
    """Every step on the filesystem, counted; the process dies before or after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.at = -1
        for name in ("rename", "unlink", "rmdir", "open", "fsync"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real: Callable) -> Callable:
        def step(*args, **kwargs):
            is_read = real.__name__ == "open" and not args[1] & os.O_CREAT
            self.steps += 0 if is_read else 2
            if not is_read and self.at == self.steps - 1:
                raise Stopped
            try:
                return real(*args, **kwargs)
            finally:
                if not is_read and self.at == self.steps:
                    raise Stopped

        return step


def lone_file(directory: Path, state: State) -> None:
    """A full version that is a single file without an index."""
    directory.mkdir(parents=True)
    entries = [(name, t.dtype, t.shape, t.data.tobytes()) for name, t in state.items()]
    (directory / "model.safetensors").write_bytes(encode_shard(entries, {"format": "pt"}))
    (directory / "config.json").write_text("{}")


def shard_of_the_lone_name(directory: Path, state: State) -> None:
    """An indexed full version, of which one of two shards would count as a version of its own."""
    write_checkpoint(directory, state)
    first = "model-00001-of-00002.safetensors"
    (directory / first).rename(directory / "model.safetensors")
    index = directory / INDEX_NAME
    told = json.loads(index.read_text())
    told["weight_map"] = {n: f.replace(first, "model.safetensors") for n, f in told["weight_map"].items()}
    index.write_text(json.dumps(told))


@pytest.mark.parametrize("renames", [True, False], ids=["renames", "object store"])
@pytest.mark.parametrize("make", [lone_file, shard_of_the_lone_name, write_checkpoint, None])
def test_death_at_any_step_is_made_good_by_the_next_run(site, monkeypatch, make, renames, tmp_path) -> None:
    """At every moment the version is there as it was, or not published at all."""
    origin = tmp_path / "origin"
    state = site.state
    if make is None:
        publish_delta(origin, 1, state, changed(state, 1), shards=2)
    else:
        make(version_dir(origin, 1), state)
    publish_full(origin, 2, state)
    dying = Dying(monkeypatch)
    if not renames:
        monkeypatch.setattr(gpusync.publish.removal, "has_atomic_rename", lambda kind: False)
    step, seen_published = 0, set()
    while True:
        step += 1
        source = tmp_path / f"copy{step}"
        dying.at = -1
        shutil.copytree(origin, source)
        dying.steps, dying.at = 0, step
        try:
            prune_stream(source, keep_last=1)
        except Stopped:
            dying.at = -1
            try:
                version = read_version(source, 1)
            except VersionMissingError:
                seen_published.add(False)
            else:
                seen_published.add(True)
                assert version.tensors.keys() == read_version(origin, 1).tensors.keys()
            report = prune_stream(source, keep_last=1)
            assert report.left == {}
            assert list_versions(source) == [2]
        else:
            break
    assert step > 8
    assert seen_published == {True, False}


def test_what_cannot_be_removed_is_an_error_that_names_it(site, states, monkeypatch) -> None:
    real = os.unlink

    def refuse(name, **kwargs) -> None:
        if str(name).startswith("delta"):
            raise OSError(errno.EACCES, "Permission denied")
        real(name, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(PublishError, match="Permission denied") as caught:
            prune_stream(site.source, keep_last=1)
    assert caught.value.path.startswith(str(version_dir(site.source, 3)))
    with pytest.raises(VersionMissingError):
        read_version(site.source, 3)
    assert prune_stream(site.source, keep_last=1).removed == (3, 2, 1)


def test_no_room_is_needed(site, states, monkeypatch) -> None:
    """A stream is pruned when its disk is full."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert prune_stream(site.source, keep_last=1).removed == (3, 2, 1)


def test_two_prunes_at_once(site, states, monkeypatch) -> None:
    """The other one takes everything away just before this one takes a step."""
    real = os.rename

    def race(*args, **kwargs) -> None:
        monkeypatch.setattr(os, "rename", real)
        prune_stream(site.source, keep_last=1)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "rename", race)
    prune_stream(site.source, keep_last=1)
    assert list_versions(site.source) == [4, 5, 6, 7]
