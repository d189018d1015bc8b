"""Publishing on filesystems that can do little, and what a reader sees of it at every step and in any order."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import threading

import pytest

import gpusync.stream.writer
from gpusync.errors import GpusyncError, VersionMissingError
from gpusync.publish import Publisher
from gpusync.stream import INDEX_NAME, read_version
from support.checkpoints import changed
from support.receiver import receive


@pytest.fixture
def object_store(monkeypatch):
    """No rename, no link, no overwriting, no unlink, no directory fsync."""
    real_open, real_fsync = os.open, os.fsync

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "not on this filesystem")

    def open_new_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR) and os.path.exists(path):
            refuse()
        return real_open(path, flags, *args, **kwargs)

    def fsync_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not on this filesystem")
        real_fsync(descriptor)

    for name in ("rename", "replace", "link", "symlink", "unlink", "remove", "truncate"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", open_new_only)
    monkeypatch.setattr(os, "fsync", fsync_files_only)


@pytest.mark.parametrize("fs_type", [None, "fuse.mountpoint-s3", "nfs4"])
@pytest.mark.usefixtures("object_store")
def test_an_object_store_is_good_enough(site, offer, monkeypatch, fs_type):
    if fs_type is not None:
        monkeypatch.setattr(gpusync.stream.writer, "filesystem_type", lambda path: fs_type)
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=1)
    first, second = changed(site.state, 1), changed(site.state, 2)
    publisher.publish(offer(first))
    publisher.publish_full(offer(second))
    assert receive(site.state, site.source, 1) == first
    assert receive(site.state, site.source, 2) == second
    # Where a rename fails against expectation, its temporary name stays: nothing can be removed here.
    temporary = [name for name in os.listdir(site.source / "weight_v000001") if name.endswith(".tmp")]
    assert bool(temporary) == (fs_type != "fuse.mountpoint-s3")
    assert read_version(site.source, 2).index.stream_id == publisher.stream_id


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("full", [False, True])
def test_no_reader_accepts_a_version_before_its_index_is_whole(site, offer, monkeypatch, renames, full):
    """A reader looks before and after every step of the writer: it accepts nothing, then everything."""
    accepted: list[bool] = []
    own = threading.local()  # what a look itself does is not looked at
    one_at_a_time = threading.Lock()

    def look() -> None:
        try:
            version = read_version(site.source, 1)
        except GpusyncError:
            accepted.append(False)
        else:
            accepted.append(True)
            assert len(version.tensors) == 6 + full

    def watched(real):
        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            if not getattr(own, "looks", False):
                own.looks = True
                try:
                    with one_at_a_time:
                        look()
                finally:
                    own.looks = False
            return result

        return call

    originals = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "rename")}
    monkeypatch.setattr(gpusync.stream.writer, "filesystem_type", lambda path: "ext4" if renames else "fuse.s3fs")
    publisher = Publisher(site.source, base_dir=site.base, shard_bytes=3000)
    with monkeypatch.context() as patched:
        for name, real in originals.items():
            patched.setattr(os, name, watched(real))
        (publisher.publish_full if full else publisher.publish)(offer(changed(site.state, 1)))
    first = accepted.index(True)
    assert first > 10
    assert all(accepted[first:])


def test_files_may_become_visible_in_any_order(site, offer, tmp_path):
    after = changed(site.state, 1, names=["layer.0.weight", "layer.0.codes", "step"])
    Publisher(site.source, base_dir=site.base, shard_bytes=1).publish(offer(after))
    published = site.source / "weight_v000001"
    names = os.listdir(published)
    assert len(names) == 4
    for number, order in enumerate(itertools.permutations(names)):
        source = tmp_path / f"seen{number}"
        (source / "weight_v000001").mkdir(parents=True)
        for name in order[:-1]:
            shutil.copy(published / name, source / "weight_v000001")
            with pytest.raises(VersionMissingError):
                read_version(source, 1)
        # The last one comes cut before it comes whole.
        data = (published / order[-1]).read_bytes()
        if order[-1] != INDEX_NAME:
            (source / "weight_v000001" / order[-1]).write_bytes(data[:-1])
            with pytest.raises(VersionMissingError):
                read_version(source, 1)
        (source / "weight_v000001" / order[-1]).write_bytes(data)
        assert receive(site.state, source, 1) == after
        assert len(read_version(source, 1).tensors) == 3
