"""A base is compared with what the stream has published, before anything is written that no reader could apply."""

from __future__ import annotations

import numpy as np
import pytest

from gpusync.digest import digest_of
from gpusync.errors import PublishError
from gpusync.publish import Publisher, publish_directories
from gpusync.stream import read_version
from support import slime
from support.checkpoints import State, Tensor, changed, write_checkpoint
from support.receiver import receive


@pytest.fixture
def states(site) -> list[State]:
    """Each version changes some tensors: what a wrong base has wrong may be of any age."""
    found = [site.state]
    for seed, names in enumerate((["step", "layer.0.weight"], ["embed.weight"], ["layer.0.weight"]), start=1):
        found.append(changed(found[-1], seed, names=names))
    return found


@pytest.fixture
def publisher(site, offer, states) -> Publisher:
    publisher = Publisher(site.source, base_dir=site.base, checksum="blake3")
    for state in states[1:]:
        publisher.publish(offer(state))
    return publisher


def refused(call) -> PublishError:
    with pytest.raises(PublishError, match="the base is not version") as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", ["step", "embed.weight", "layer.0.weight"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_base_that_is_not_the_newest_version(site, publisher, states, visible, tmp_path, name, resume) -> None:
    wrong = changed(states[3], 9, names=[name])
    base, new = write_checkpoint(tmp_path / "wrong", wrong), write_checkpoint(tmp_path / "new", changed(wrong, 4))
    before = visible(site.source)
    error = refused(lambda: publish_directories(site.source, base_dir=base, new_dir=new, base_version=3, resume=resume))
    assert (error.tensor, error.version, error.path) == (name, 3, str(base))
    assert (error.expected, error.found) == tuple(digest_of("blake3", s[name].data) for s in (states[3], wrong))
    assert visible(site.source) == before


def test_the_newest_version_as_base(site, publisher, states, tmp_path) -> None:
    base, after = write_checkpoint(tmp_path / "three", states[3], shards=3), changed(states[3], 4)
    new = write_checkpoint(tmp_path / "new", after)
    publish_directories(site.source, base_dir=base, new_dir=new, base_version=3, resume=True)
    assert receive(site.state, site.source, 4) == after


def test_the_first_tensor_is_named(site, publisher, states, tmp_path) -> None:
    base = write_checkpoint(tmp_path / "wrong", changed(states[3], 9))
    assert refused(lambda: Publisher(site.source, base_dir=base, base_version=3, resume=True)).tensor == "embed.weight"


def test_what_was_never_published_is_not_compared(site, publisher, states, tmp_path) -> None:
    other = changed(states[3], 9, names=["layer.1.weight"])
    assert Publisher(site.source, base_dir=write_checkpoint(tmp_path / "a", other), base_version=3, resume=True)


@pytest.mark.parametrize("older", [1, 2])
def test_the_base_of_a_shortcut(site, offer, publisher, states, tmp_path, older) -> None:
    base = write_checkpoint(tmp_path / "wrong", changed(states[older], 9, names=["step"]))
    shortcut = Publisher(site.source, base_dir=base, base_version=older)
    error = refused(lambda: shortcut.publish(offer(changed(states[3], 4)), version=4))
    assert (error.tensor, error.version) == ("step", older)


@pytest.mark.parametrize("name", ["step", "embed.weight", "layer.0.weight"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
def test_a_resumed_streams_base(site, offer, states, tmp_path, name, encoding) -> None:
    """Deltas on it do not give what they promise; the first of each tensor tells."""
    publisher = Publisher(site.source, base_dir=site.base, encoding=encoding)
    for state in states[1:]:
        publisher.publish(offer(state))
    base = write_checkpoint(tmp_path / "wrong", changed(site.state, 9, names=[name], share=0.5))
    error = refused(lambda: Publisher(site.source, base_dir=base, resume=True))
    assert (error.tensor, error.version, error.path) == (name, 0, str(base))
    first = 2 if name == "embed.weight" else 1
    assert (f"version {first} was" in str(error), error.expected) == (
        True,
        read_version(site.source, first).tensors[name].checksum,
    )


def test_a_base_between_two_versions(site, offer, publisher, states, tmp_path) -> None:
    """Tensors of older versions are as published, those of newer ones as their deltas need them."""
    for name in ("step", "embed.weight"):
        base = write_checkpoint(tmp_path / name, changed(states[1], 9, names=[name]))
        call = {"base_dir": base, "base_version": 1, "resume": True}
        assert refused(lambda call=call: Publisher(site.source, **call)).tensor == name
    right = write_checkpoint(tmp_path / "right", states[1])
    Publisher(site.source, base_dir=right, base_version=1, resume=True).publish(offer(changed(states[3], 4)))
    assert receive(site.state, site.source, 4) == changed(states[3], 4)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_full_version_speaks_of_every_tensor(site, offer, publisher, states, tmp_path, checksums) -> None:
    """Of its form as well; and by its bytes, where its writer published no checksums."""
    if checksums:
        publisher.publish_full(offer(states[3]))
    else:
        slime.publish_full(site.source, 4, states[3])
    after = changed(states[3], 5, names=["step"])
    slime.publish_delta(site.source, 5, states[3], after)

    def base_of(label: str, state: State) -> PublishError:
        base = write_checkpoint(tmp_path / label, state)
        return refused(lambda: Publisher(site.source, base_dir=base, base_version=5, resume=True))

    assert base_of("bytes", changed(after, 9, names=["layer.1.weight"])).tensor == "layer.1.weight"
    flat = Tensor("BF16", (64 * 48,), after["layer.0.weight"].data)
    error = base_of("form", {**after, "layer.0.weight": flat})
    assert (error.tensor, str(error.expected), str(error.found)) == ("layer.0.weight", "BF16[64, 48]", "BF16[3072]")
    error = base_of("wider", {**after, "more": flat})
    assert (error.tensor, error.expected, str(error.found)) == ("more", "no such tensor", "BF16[3072]")
    right = write_checkpoint(tmp_path / "right", after)
    Publisher(site.source, base_dir=right, base_version=5, resume=True).publish(offer(states[2]))
    site.pull(6)
    assert site.local_state() == states[2]


def test_a_base_behind_a_full_version_is_not_read(site, offer, publisher, states, tmp_path) -> None:
    publisher.publish_full(offer(states[3]))
    base = write_checkpoint(tmp_path / "other", changed(site.state, 9))
    Publisher(site.source, base_dir=base, resume=True).publish(offer(states[2]))
    assert receive(site.state, site.source, 5) == states[2]


@pytest.mark.parametrize("base_version", [0, 3])
def test_a_tensor_that_the_base_lacks(site, publisher, states, tmp_path, base_version) -> None:
    state = {name: t for name, t in states[base_version].items() if name != "step"}
    base = write_checkpoint(tmp_path / "narrow", state)
    error = refused(lambda: Publisher(site.source, base_dir=base, base_version=base_version, resume=True))
    assert (error.tensor, error.found) == ("step", "no such tensor")


def test_a_version_that_is_not_there_says_nothing(site, offer, states) -> None:
    Publisher(site.source, base_dir=site.base, base_version=7).publish(offer(states[1]))
    assert read_version(site.source, 8).index.base_version == 7


def test_a_wrong_base_stays_wrong(site, offer, publisher, states, tmp_path) -> None:
    """The check is not passed over when the same is tried again; a full version needs none."""
    base = write_checkpoint(tmp_path / "wrong", changed(states[3], 9, names=["step"]))
    again = Publisher(site.source, base_dir=base, base_version=3)
    for _ in range(2):
        refused(lambda: again.publish(offer(states[1])))
    again.publish_full(offer(states[2]))
    again.publish(offer(states[1]))
    assert receive(site.state, site.source, 5) == states[1]


def test_tensors_of_no_bytes(site, offer, tmp_path) -> None:
    state = {**site.state, "none": Tensor("F32", (0, 3), np.empty(0, np.uint8))}
    publisher = Publisher(site.source)
    publisher.publish_full(offer(state))
    base = write_checkpoint(tmp_path / "right", state)
    after = changed(state, 1, names=["step"])
    Publisher(site.source, base_dir=base, base_version=1, resume=True).publish(offer(after))
    assert receive(site.state, site.source, 2) == after
