"""A delta on an older version: every reader reaches it, wherever it is, and the stream goes on from there."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from gpusync import Mirror
from gpusync.errors import ChainError, GpusyncError, HookError, LayoutError, PublishError, VersionMissingError
from gpusync.publish import Publisher, StoredBytes, prune_stream
from gpusync.stream import read_version
from support import slime
from support.checkpoints import State, Tensor, changed, write_checkpoint
from support.receiver import receive
from support.slime import version_dir


@pytest.fixture
def states(site) -> list[State]:
    found = [site.state]
    for seed in range(1, 9):
        found.append(changed(found[-1], seed))
    return found


@pytest.fixture
def reach(site) -> Callable[..., None]:
    """Readers at each version of `held`, and a fresh one, all come to `target`, as does one that is not ours."""

    def check(target: int, expected: State, *, held: dict[int, str]) -> None:
        for version, seed in {**held, -1: "full or base"}.items():
            shutil.rmtree(site.local, ignore_errors=True)
            if version >= 0:
                site.pull(version)
            report = site.pull(target)
            assert report.seed in seed, (version, report.reason)
            assert site.local_state() == expected, version
        assert receive(site.state, site.source, target) == expected

    return check


@pytest.mark.parametrize("keep", [True, False], ids=["memory", "stream"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
def test_every_reader_reaches_it_and_what_follows(site, offer, states, reach, encoding, keep) -> None:
    publisher = Publisher(site.source, base_dir=site.base, encoding=encoding, keep_snapshot=keep, workers=2)
    for version in range(1, 5):
        publisher.publish(offer(states[version]))
    report = publisher.publish(offer(states[5]), base_version=2)
    assert (report.version, report.base_version, report.kind, publisher.version) == (5, 2, "delta", 5)
    reach(5, states[5], held={2: "store", 4: "base", 1: "store"})
    report = publisher.publish(offer(states[6]))
    assert (report.version, report.base_version) == (6, 5)
    reach(6, states[6], held={2: "store", 4: "base", 5: "store"})


@pytest.mark.parametrize(
    ("base", "full", "seed"),
    [(0, None, "base"), (1, 2, "base"), (2, 2, "full"), (3, 2, "full"), (3, 3, "full")],
    ids=["on the base", "older than a full one", "on a full one", "after a full one", "on the newest but one, full"],
)
@pytest.mark.parametrize("keep", [True, False], ids=["memory", "stream"])
def test_on_any_older_version(site, offer, states, reach, base, full, seed, keep) -> None:
    publisher = Publisher(site.source, base_dir=site.base, keep_snapshot=keep)
    for version in range(1, 5):
        (publisher.publish_full if version == full else publisher.publish)(offer(states[version]))
    publisher.publish(offer(states[5]), base_version=base)
    reach(5, states[5], held={base: "store", 4: seed})
    publisher.publish(offer(states[6]))
    publisher.publish(offer(states[7]), base_version=5)
    reach(7, states[7], held={4: seed, 5: "store", 6: seed})


@pytest.mark.parametrize("keep", [True, False], ids=["memory", "stream"])
def test_tensors_that_are_not_offered_are_as_in_the_newest_version(site, offer, states, reach, keep) -> None:
    """What changed between the older version and the newest must be in the shortcut, offered or not."""
    publisher = Publisher(site.source, base_dir=site.base, keep_snapshot=keep)
    first = changed(site.state, 1, names=["layer.1.weight"])
    second = changed(first, 2, names=["embed.weight", "step"])
    third = changed(second, 3, names=["layer.0.scale"])
    for state in (first, second):
        publisher.publish(offer(state))
    report = publisher.publish(offer({"layer.0.scale": third["layer.0.scale"]}), base_version=1)
    assert (report.tensors_offered, report.tensors_changed) == (1, 1)
    assert read_version(site.source, 3).tensors.keys() == {"embed.weight", "step", "layer.0.scale"}
    reach(3, third, held={1: "store", 2: "base"})
    fourth = changed(third, 4)
    publisher.publish(offer(fourth))
    reach(4, fourth, held={1: "store", 3: "store"})
    # Nothing at all is offered, by a publisher that has held nothing yet.
    again = Publisher(site.source, base_dir=site.base, resume=True, keep_snapshot=keep)
    again.publish({}, base_version=0)
    reach(5, fourth, held={0: "store", 4: "base"})


def test_a_tensor_that_is_back_where_it_was(site, offer, states, reach) -> None:
    """Unchanged since the older version, so not in the shortcut, but not as in the newest: the next delta knows."""
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2):
        publisher.publish(offer(states[version]))
    back = {**states[2], "step": states[1]["step"], "layer.1.weight": states[1]["layer.1.weight"]}
    publisher.publish(offer(back), base_version=1)
    assert not {"step", "layer.1.weight"} & read_version(site.source, 3).tensors.keys()
    last = changed(back, 9, names=["step"])
    publisher.publish(offer(last))
    assert read_version(site.source, 4).tensors.keys() == {"step"}
    reach(4, last, held={1: "store", 2: "base", 3: "store"})


def test_a_tensor_no_reader_holds_is_no_obstacle(site, offer, states) -> None:
    """A tied head that the trainer offers and the checkpoint does not have."""
    tied = {"lm_head.weight": Tensor("BF16", (4, 4), np.arange(32, dtype=np.uint8))}
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2):
        publisher.publish(offer({**states[version], **tied}))
    publisher.publish(offer({**states[3], **tied}), base_version=1)
    assert receive(site.state, site.source, 3) == states[3]
    with pytest.raises(PublishError, match="publish a full version first"):
        publisher.publish(offer({**states[3], **changed(tied, 1)}), base_version=1)


@pytest.mark.parametrize("keep", [True, False], ids=["memory", "stream"])
@pytest.mark.parametrize("failing", [1, 2], ids=["after the shards", "after the index"])
def test_after_a_failure_the_publisher_is_where_it_was(site, offer, states, reach, failing, keep) -> None:
    """The snapshot is the newest version's: the same shortcut can be tried again, or a delta on the newest."""
    calls = iter([False, False] * 3 + [number == failing for number in (1, 2)] * 2 + [False] * 9)

    def hook(_: str) -> None:
        if next(calls):
            raise OSError(5, "volume commit failed")

    publisher = Publisher(site.source, base_dir=site.base, post_write_hook=hook, keep_snapshot=keep)
    for version in (1, 2, 3):
        publisher.publish(offer(states[version]))
    with pytest.raises(HookError):
        publisher.publish(offer(states[4]), base_version=1)
    if failing == 1:
        next(calls)
    assert publisher.version == 3
    assert not version_dir(site.source, 4).exists()
    with pytest.raises(HookError):
        publisher.publish(offer(states[5]), base_version=2)
    if failing == 1:
        next(calls)
    publisher.publish(offer(states[6]))
    assert read_version(site.source, 4).index.base_version == 3
    reach(4, states[6], held={1: "store", 3: "store"})
    publisher.publish(offer(states[7]), base_version=1)
    reach(5, states[7], held={1: "store", 4: "base"})


def test_the_newest_version_as_base_is_an_ordinary_delta(site, offer, states) -> None:
    publisher = Publisher(site.source, base_dir=site.base, full_every=3)
    publisher.publish(offer(states[1]))
    report = publisher.publish(offer(states[2]), base_version=1)
    assert (report.base_version, report.tensors_changed) == (1, 6)
    # A full version would be due.
    assert publisher.publish(offer(states[3]), base_version=1).base_version == 1
    assert receive(site.state, site.source, 3) == states[3]


def test_a_resumed_publisher_goes_on_after_a_shortcut(site, offer, states, reach) -> None:
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2, 3):
        publisher.publish(offer(states[version]))
    publisher.publish(offer(states[4]), base_version=1)
    resumed = Publisher(site.source, base_dir=site.base, resume=True)
    resumed.publish(offer(states[5]))
    resumed.publish(offer(states[6]), base_version=3)
    reach(6, states[6], held={3: "store", 5: "base"})


def test_a_shortcut_keeps_what_it_stands_on_from_being_pruned(site, offer, states, reach) -> None:
    publisher = Publisher(site.source, base_dir=site.base, full_every=2)
    for version in range(1, 6):
        publisher.publish(offer(states[version]))
    publisher.publish(offer(states[6]), base_version=3)
    assert prune_stream(site.source, keep_last=1).kept == {2: "needed", 3: "needed", 6: "newest"}
    reach(6, states[6], held={3: "store", 2: "store"})
    publisher.publish(offer(states[7]), version=7)
    reach(7, states[7], held={6: "store", 3: "store"})


class TestWhatCannotCarryADelta:
    @pytest.fixture
    def publisher(self, site, offer, states) -> Publisher:
        publisher = Publisher(site.source, base_dir=site.base)
        for version in (1, 2, 3):
            publisher.publish(offer(states[version]))
        return publisher

    def check(self, publisher: Publisher, offers: dict, base: int, error: type[GpusyncError]) -> GpusyncError:
        with pytest.raises(error) as caught:
            publisher.publish(offers, base_version=base)
        assert publisher.version == 3
        return caught.value

    def test_a_version_that_is_not_older(self, publisher, offer, states) -> None:
        error = self.check(publisher, offer(states[4]), 4, PublishError)
        assert (error.version, error.expected, error.found) == (4, "at most 3", 4)
        self.check(publisher, offer(states[4]), -1, ChainError)

    def test_a_version_that_was_pruned(self, publisher, site, offer, states) -> None:
        shutil.rmtree(version_dir(site.source, 1))
        assert self.check(publisher, offer(states[4]), 1, VersionMissingError).version == 1
        assert self.check(publisher, offer(states[4]), 2, ChainError).version == 1
        publisher.publish(offer(states[4]), base_version=0)
        assert receive(site.state, site.source, 4) == states[4]

    def test_a_version_of_another_stream(self, site, offer, states) -> None:
        Publisher(site.source, base_dir=site.base, stream_id="old").publish(offer(states[1]))
        publisher = Publisher(site.source, base_dir=site.base, stream_id="new")
        for version in (2, 3):
            publisher.publish(offer(states[version]), version=version)
        error = self.check(publisher, offer(states[4]), 1, ChainError)
        assert (error.expected, error.found) == ("new", "old")

    def test_a_version_of_slime_is_fine(self, site, offer, states, reach) -> None:
        slime.publish_delta(site.source, 1, states[0], states[1])
        slime.publish_delta(site.source, 2, states[1], states[2])
        Publisher(site.source, base_dir=site.base, resume=True).publish(offer(states[3]), base_version=1)
        reach(3, states[3], held={1: "store", 2: "base"})

    def test_another_set_of_tensors(self, publisher, site, offer, states) -> None:
        wider = {**states[4], "new.weight": states[4]["step"]}
        publisher.publish_full(offer(wider))
        with pytest.raises(LayoutError, match="publish a full version instead") as caught:
            publisher.publish(offer(wider), base_version=3)
        assert (caught.value.tensor, str(caught.value.expected), caught.value.found) == (
            "new.weight",
            "I64[3]",
            "no such tensor",
        )

    def test_an_older_version_without_the_base_it_stands_on(self, site, offer, states, reach) -> None:
        publisher = Publisher(site.source)
        publisher.publish_full(offer(states[1]))
        for version in (2, 3):
            publisher.publish(offer(states[version]))
        assert "not here" in str(self.check(publisher, offer(states[4]), 0, ChainError))
        publisher.publish(offer(states[4]), base_version=1)
        reach(4, states[4], held={1: "store", 3: "full"})

    def test_a_base_dir_that_is_newer_than_the_version(self, site, offer, states, reach, tmp_path) -> None:
        """Its state helps nobody there; a full version below does."""
        publisher = Publisher(site.source, base_dir=site.base)
        publisher.publish_full(offer(states[1]))
        publisher.publish(offer(states[2]))
        newer = write_checkpoint(tmp_path / "newer", states[2])
        later = Publisher(site.source, base_dir=newer, base_version=2)
        later.publish(offer(states[3]))
        later.publish(offer(states[4]), base_version=1)
        reach(4, states[4], held={1: "store", 3: "full"})


@pytest.mark.parametrize("held", [1, 3])
def test_a_mirror_written_behind_reaches_it(site, offer, states, held) -> None:
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2, 3):
        publisher.publish(offer(states[version]))
    with Mirror(site.local, base_dir=site.base, source_dir=site.source, workers=1) as mirror:
        mirror.receive(held)
        mirror.accept(held)
        publisher.publish(offer(states[4]), base_version=1)
        assert mirror.receive(4).seed == ("store" if held == 1 else "base")
        mirror.accept(4)
        mirror.flush(60)
    assert site.local_state() == states[4]


def test_memory_stays_that_of_a_few_tensors(tmp_path) -> None:
    """48 tensors of 1 MiB, all changed twice: both states are read tensor by tensor."""
    count, nbytes = 48, 1 << 20
    rng = np.random.default_rng(0)
    names = [f"w{i:03d}" for i in range(count)]
    base = {name: Tensor("U8", (1, nbytes), rng.integers(0, 256, nbytes, np.uint8)) for name in names}
    write_checkpoint(tmp_path / "base", base, shards=8)
    del base

    def tensors():
        for name in names:
            yield name, StoredBytes(dtype="U8", shape=(1, nbytes), data=rng.integers(0, 256, nbytes, np.uint8))

    publisher = Publisher(
        tmp_path / "stream", base_dir=tmp_path / "base", workers=2, shard_bytes=4 * nbytes, keep_snapshot=False
    )
    for _ in range(2):
        publisher.publish(tensors())
    for offers in (tensors(), ()):
        tracemalloc.start()
        publisher.publish(offers, base_version=1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24 * nbytes
