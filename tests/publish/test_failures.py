"""A publish that fails leaves nothing visible and nothing advanced, and can be tried again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import gpusync.publish.shards
from gpusync.errors import HookError, PublishError, VersionMissingError
from gpusync.publish import Publisher
from gpusync.stream import INDEX_NAME, read_version
from support.checkpoints import changed, snapshot
from support.receiver import receive


def payloads(source: Path, version: int) -> dict[str, str]:
    return dict(read_version(source, version).index.payload_checksums)


class Hook:
    """Records whether the index was there; raises at the calls it is told to."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.saw_index: list[bool] = []

    def __call__(self, version_dir: str) -> None:
        self.saw_index.append(INDEX_NAME in os.listdir(version_dir))
        if len(self.saw_index) in self.failing:
            raise RuntimeError("volume commit failed")


def test_the_hook_runs_after_the_shards_and_again_after_the_index(site, offer):
    hook = Hook()
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=hook)
    publisher.publish(offer(changed(site.state, 1)))
    assert hook.saw_index == [False, True]
    publisher.publish({})
    assert hook.saw_index == [False, True, True]


def test_a_hook_may_be_named_by_its_import_path(site, offer, monkeypatch, tmp_path):
    (tmp_path / "publish_hook_under_test.py").write_text("seen = []\nhook = seen.append\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    Publisher(site.source, base_dir=site.base, post_write_hook="publish_hook_under_test:hook").publish({})
    import publish_hook_under_test

    assert publish_hook_under_test.seen == [str(site.source / "weight_v000001")]
    with pytest.raises(HookError, match="no_such_module"):
        Publisher(site.source, base_dir=site.base, post_write_hook="no_such_module:hook")


@pytest.mark.parametrize("failing", [1, 2], ids=["after the shards", "after the index"])
@pytest.mark.parametrize("full", [False, True])
def test_a_failing_hook_withdraws_the_version(site, offer, visible, failing, full):
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=Hook(failing))
    publish = publisher.publish_full if full else publisher.publish
    after = changed(site.state, 1)
    with pytest.raises(HookError, match="volume commit failed") as caught:
        publish(offer(after))
    assert (caught.value.version, caught.value.path) == (1, str(site.source / "weight_v000001"))
    assert (visible(site.source), publisher.version) == ([], 0)
    assert publish(offer(after)).version == 1
    assert receive(site.state, site.source, 1) == after


def test_the_snapshot_is_where_it_was_after_a_failure(site, offer):
    """What is published after a failure is the change since the last version, not since the failed one."""
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=Hook(3, 5))
    reference = Publisher(site.source.parent / "reference", base_dir=site.base)
    first, lost, second = (changed(site.state, seed, share=share) for seed, share in ((1, 0.01), (2, 0.6), (3, 0.01)))
    for one in (publisher, reference):
        one.publish(offer(first))
    for _ in range(2):
        with pytest.raises(HookError):
            publisher.publish(offer(lost))
    for one in (publisher, reference):
        one.publish(offer(second))
    assert payloads(site.source, 2) == payloads(reference._settings.source_dir, 2)
    assert receive(site.state, site.source, 2) == second


def test_an_index_that_cannot_be_withdrawn_is_a_published_version(site, offer, monkeypatch):
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=Hook(2))
    first, second = changed(site.state, 1), changed(site.state, 2)

    def no_unlink(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "not on this filesystem")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", no_unlink)
        with pytest.raises(HookError):
            publisher.publish(offer(first))
    assert publisher.version == 1
    assert receive(site.state, site.source, 1) == first
    publisher.publish(offer(second))
    assert receive(site.state, site.source, 2) == second


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_failing_write_anywhere_leaves_nothing(site, offer, visible, monkeypatch, nth):
    """The nth fsync fails: of a shard, a side file, the index, or one of their directories."""
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=2_500_000)
    after, real, calls = changed(site.state, 1), os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(PublishError, match="Input/output error"):
            publisher.publish_full(offer(after))
    assert (visible(site.source), publisher.version) == ([], 0)
    publisher.publish_full(offer(after))
    assert receive(site.state, site.source, 1) == after


def test_what_an_iterator_raises_comes_out_as_it_is(site, offer, visible):
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=1)
    after = changed(site.state, 1)

    def tensors():
        yield from list(offer(after).items())[:3]
        raise ZeroDivisionError("in the trainer")

    with pytest.raises(ZeroDivisionError, match="in the trainer"):
        publisher.publish(tensors())
    assert (visible(site.source), publisher.version) == ([], 0)
    publisher.publish(offer(after))
    assert receive(site.state, site.source, 1) == after


def test_a_published_version_is_never_written_again(site, offer):
    publisher = Publisher(site.source, base_dir=site.base)
    publisher.publish(offer(changed(site.state, 1)))
    before = snapshot(site.source / "weight_v000001")
    with pytest.raises(PublishError, match="published already, resume=True continues the stream") as caught:
        Publisher(site.source, base_dir=site.base).publish(offer(changed(site.state, 2)))
    assert caught.value.version == 1
    with pytest.raises(PublishError, match="only go up"):
        publisher.publish({}, version=1)
    assert snapshot(site.source / "weight_v000001") == before


def test_what_an_attempt_left_that_was_killed_is_removed(site, offer, monkeypatch):
    """A dead process removes nothing: its shards, and a file under a temporary name, are still there."""
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=Hook(1), shard_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(gpusync.publish.shards, "remove_file", lambda path: False)
        with pytest.raises(HookError):
            publisher.publish(offer(changed(site.state, 1)))
    directory = site.source / "weight_v000001"
    left = set(os.listdir(directory))
    assert len(left) == 6
    half = directory / ".delta-00003-of-00004-0123456789ab-00001.safetensors.0123456789ab.tmp"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    with pytest.raises(VersionMissingError):
        read_version(site.source, 1)
    after = changed(site.state, 2)
    Publisher(site.source, base_dir=site.base).publish(offer(after))
    assert not left.intersection(os.listdir(directory))
    assert not any(name.endswith(".tmp") for name in os.listdir(directory))
    assert receive(site.state, site.source, 1) == after


def test_what_cannot_be_removed_is_told(site, offer, monkeypatch):
    directory = site.source / "weight_v000001"
    directory.mkdir()
    name = "delta-00000-of-00001-0123456789ab-00001.safetensors"
    (directory / name).write_bytes(b"left")
    os.utime(directory / name, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(gpusync.publish.shards, "remove_file", lambda path: False)
        report = Publisher(site.source, base_dir=site.base).publish(offer(changed(site.state, 1)))
    assert name in report.warnings[0]


def test_a_shard_of_another_writer_is_neither_removed_nor_ignored(site, offer):
    directory = site.source / "weight_v000001"
    directory.mkdir()
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"of another run")
    with pytest.raises(PublishError, match="another writer") as caught:
        Publisher(site.source, base_dir=site.base).publish(offer(changed(site.state, 1)))
    assert caught.value.path == str(directory / "model-00001-of-00002.safetensors")
    assert os.listdir(directory) == ["model-00001-of-00002.safetensors"]
