"""Two publishers that write one version at once: at most one publishes, and what is published is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import gpusync.publish.shards
from gpusync.errors import HookError, PublishError
from gpusync.publish import Publisher
from gpusync.publish.shards import remove_leftovers
from gpusync.publish.writers import begin_attempt, end_attempt, may_be_under_way
from gpusync.stream import INDEX_NAME
from support.checkpoints import changed
from support.receiver import receive

WRITE_A_SHARD = """
import sys, time
from pathlib import Path
import numpy as np
from gpusync.publish.encode import Stored
from gpusync.publish.shards import ShardSet
shards = ShardSet(Path(sys.argv[1]), is_full=False, rank=0, size=1, shard_bytes=1)
shards.add(Stored(name="a", dtype="U8", shape=(9,), data=np.ones(9, np.uint8), checksum="", payload_checksum=""))
print("written", flush=True)
time.sleep(60)
"""


@pytest.fixture
def directory(site):
    path = site.source / "weight_v000001"
    path.mkdir(parents=True)
    return path


def test_the_second_leaves_the_first_alone(site, offer):
    after = changed(site.state, 1)
    problems: list[PublishError] = []

    def second(version_dir: str) -> None:
        if INDEX_NAME in os.listdir(version_dir):
            return
        with pytest.raises(PublishError, match="another publisher seems to write this version") as caught:
            Publisher(site.source, base_dir=site.base).publish(offer(changed(site.state, 2)))
        problems.append(caught.value)

    Publisher(site.source, base_dir=site.base, post_write_hook=second, shard_bytes=1).publish(offer(after))
    assert len(problems) == 1
    assert receive(site.state, site.source, 1) == after


def test_two_that_began_before_either_wrote(site, offer, visible):
    """Neither finds leftovers; the one that looks after both wrote gives way, and can try again."""
    first, second = (Publisher(site.source, base_dir=site.base) for _ in range(2))
    one, other = changed(site.state, 1), changed(site.state, 2)

    def tensors():
        yield from offer(one).items()
        rival = gpusync.publish.shards.ShardSet(
            site.source / "weight_v000001", is_full=False, rank=0, size=1, shard_bytes=1
        )
        rivals.append(rival)
        rival._write(
            [
                gpusync.publish.encode.Stored(
                    name="a", dtype="U8", shape=(3,), data=b"abc", checksum="", payload_checksum=""
                )
            ]
        )

    rivals: list[gpusync.publish.shards.ShardSet] = []
    with pytest.raises(PublishError, match="another publisher seems to write"):
        first.publish(tensors())
    assert len(visible(site.source)) == 2
    rivals[0].close()
    second.publish(offer(other))
    assert receive(site.state, site.source, 1) == other


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_shard_that_is_gone_before_the_index(site, offer, visible, harm):
    after = changed(site.state, 1)
    harms = [harm]

    def hook(version_dir: str) -> None:
        if not harms:
            return
        harms.clear()
        path = os.path.join(version_dir, sorted(os.listdir(version_dir))[0])
        if harm == "gone":
            os.unlink(path)
        else:
            os.truncate(path, 5)

    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=hook, shard_bytes=1)
    with pytest.raises(PublishError, match="another publisher writes this version"):
        publisher.publish(offer(after))
    assert (visible(site.source), publisher.version) == ([], 0)
    publisher.publish(offer(after))
    assert receive(site.state, site.source, 1) == after


def test_a_publisher_is_no_rival_of_itself(site, offer, monkeypatch):
    """Its failed attempt's files could not be removed; they are younger than any limit."""

    def hook(version_dir: str) -> None:
        if fails.pop():
            raise RuntimeError("volume commit failed")

    fails = [False, False, True]
    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=hook)
    with monkeypatch.context() as patched:
        patched.setattr(gpusync.publish.shards, "remove_file", lambda path: False)
        with pytest.raises(HookError):
            publisher.publish(offer(changed(site.state, 1)))
    (left,) = os.listdir(site.source / "weight_v000001")
    after = changed(site.state, 2)
    publisher.publish(offer(after))
    assert left not in os.listdir(site.source / "weight_v000001")
    assert receive(site.state, site.source, 1) == after


def test_another_process_of_this_host_counts_until_it_is_dead(site, offer, directory):
    after = changed(site.state, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITE_A_SHARD, directory], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        (name,) = os.listdir(directory)
        os.utime(directory / name, (0, 0))
        publisher = Publisher(site.source, base_dir=site.base)
        with pytest.raises(PublishError, match="another publisher seems to write this version") as caught:
            publisher.publish(offer(after))
        assert caught.value.path == str(directory / name)
        assert os.listdir(directory) == [name]
        writer.kill()
        # It is a zombie until somebody waits for it: dead enough.
        while may_be_under_way(name.split("-")[4], directory / name):
            time.sleep(0.01)
        os.utime(directory / name)
        publisher.publish(offer(after))
    finally:
        writer.kill()
        writer.communicate()
    assert name not in os.listdir(directory)
    assert receive(site.state, site.source, 1) == after


@pytest.mark.parametrize(("age", "refused"), [(0, True), (50, True), (-50, True), (70, False)])
@pytest.mark.parametrize("token", ["0123456789ab", "0123456789abcdef01234567"])
def test_of_other_hosts_the_age_tells(tmp_path, age, refused, token):
    name = f"delta-00000-of-00001-{token}-00001.safetensors"
    (tmp_path / name).write_bytes(b"1")
    os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_leftovers(tmp_path, rank=1, size=2)
    if refused:
        with pytest.raises(PublishError, match="another publisher seems"):
            remove_leftovers(tmp_path, rank=0, size=2)
    else:
        remove_leftovers(tmp_path, rank=0, size=2)
    assert os.listdir(tmp_path) == ([name] if refused else [])


def test_what_was_published_meanwhile_is_not_emptied(tmp_path):
    token = begin_attempt()
    end_attempt(token)
    for name in (f"delta-00000-of-00001-{token}-00001.safetensors", INDEX_NAME):
        (tmp_path / name).write_bytes(b"1")
    with pytest.raises(PublishError, match="just published"):
        remove_leftovers(tmp_path, rank=0, size=1)
    assert len(os.listdir(tmp_path)) == 2


def test_an_attempt_is_under_way_until_it_ends(tmp_path):
    token, other = begin_attempt(), begin_attempt()
    assert token != other
    assert may_be_under_way(token, tmp_path / "file")
    end_attempt(token)
    end_attempt(token)
    assert not may_be_under_way(token, tmp_path / "file")
    assert may_be_under_way(other, tmp_path / "file")
    end_attempt(other)
