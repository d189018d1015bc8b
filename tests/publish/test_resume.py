"""A publisher that starts anew goes on where the stream is, from the bytes its readers hold."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from gpusync.errors import ChainError, IndexFormatError, MissingLinkError, PublishError
from gpusync.publish import Publisher, publish_directories
from gpusync.publish.start import find_newest
from gpusync.stream import INDEX_NAME, read_version
from support import slime
from support.checkpoints import changed, write_checkpoint
from support.receiver import receive


@pytest.fixture
def states(site):
    found = [site.state]
    for seed in range(1, 7):
        found.append(changed(found[-1], seed))
    return found


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "gpusync"])
def test_deltas_go_on_after_deltas(site, offer, states, encoding, keep):
    for version in range(1, 4):
        publisher = Publisher(
            site.source, base_dir=site.base, encoding=encoding, resume=True, keep_snapshot=keep, checksum="adler32"
        )
        assert publisher.version == version - 1
        report = publisher.publish(offer(states[version]))
        assert (report.version, report.base_version) == (version, version - 1)
    site.pull(3)
    assert site.local_state() == states[3]
    assert len({read_version(site.source, version).index.stream_id for version in (1, 2, 3)}) == 1


def test_only_what_changed_since_is_published(site, offer, states):
    Publisher(site.source, base_dir=site.base).publish(offer(states[1]))
    report = Publisher(site.source, base_dir=site.base, resume=True).publish(offer(states[1]))
    assert report.tensors_changed == 0


@pytest.mark.parametrize("with_base", [True, False])
def test_it_starts_at_the_newest_full_version(site, offer, states, with_base):
    publisher = Publisher(site.source, base_dir=site.base)
    publisher.publish(offer(states[1]))
    publisher.publish_full(offer(states[2]))
    publisher.publish(offer(states[3]))
    shutil.rmtree(site.source / "weight_v000001")
    resumed = Publisher(site.source, base_dir=site.base if with_base else None, resume=True)
    assert resumed.version == 3
    resumed.publish(offer(states[4]))
    assert receive(site.state, site.source, 4) == states[4]


def test_where_nothing_is_published_it_begins(site, offer, states):
    (site.source / "weight_v000003").mkdir()
    publisher = Publisher(site.source / "not there", base_dir=site.base, resume=True, stream_id="mine")
    assert (publisher.version, publisher.stream_id) == (0, "mine")
    # What an attempt that died has left counts for nothing.
    assert find_newest(site.source) is None
    publisher = Publisher(site.source, base_dir=site.base, resume=True)
    publisher.publish(offer(states[1]), version=3)
    assert receive(site.state, site.source, 3) == states[1]


def test_it_goes_on_after_another_writers_versions(site, offer, states):
    """slime's versions have no stream_id; ours, that follow them, do."""
    slime.publish_delta(site.source, 1, states[0], states[1], encoding="xor", shards=2)
    slime.publish_delta(site.source, 2, states[1], states[2], encoding="overwrite", checksum="blake3")
    publisher = Publisher(site.source, base_dir=site.base, resume=True, stream_id="mine", encoding="gpusync")
    assert (publisher.version, publisher.stream_id) == (2, "mine")
    publisher.publish(offer(states[3]))
    site.pull(3)
    assert site.local_state() == states[3]


def test_another_streams_versions_are_not_gone_on_from(site, offer, states):
    Publisher(site.source, base_dir=site.base, stream_id="one").publish(offer(states[1]))
    with pytest.raises(PublishError, match="another stream") as caught:
        Publisher(site.source, base_dir=site.base, stream_id="two", resume=True)
    assert (caught.value.expected, caught.value.found, caught.value.version) == ("two", "one", 1)


@pytest.mark.parametrize("first", [1, 5], ids=["from the base", "from a version that is not there"])
@pytest.mark.parametrize("keep", [True, False])
def test_without_base_and_full_version_only_a_full_version_goes_on(site, offer, states, visible, first, keep):
    base = Publisher(site.source, base_dir=site.base, base_version=first - 1)
    base.publish(offer(states[1]))
    publisher = Publisher(site.source, resume=True, keep_snapshot=keep)
    assert (publisher.version, publisher.stream_id) == (first, base.stream_id)
    before = visible(site.source)
    with pytest.raises(PublishError, match=r"base_dir.*publish_full"):
        publisher.publish(offer(states[2]))
    # A tensor that the stream has published would be lost.
    with pytest.raises(PublishError, match=r"not offered.*base_dir \(--base\)") as caught:
        publisher.publish_full(offer({name: t for name, t in states[2].items() if name != "layer.1.weight"}))
    assert caught.value.tensor == "layer.1.weight"
    assert visible(site.source) == before
    publisher.publish_full(offer(states[2]))
    publisher.publish(offer(states[3]))
    assert receive(site.state, site.source, first + 2) == states[3]


def test_a_chain_that_passes_the_given_base_by_cannot_be_resumed(site, offer, states, tmp_path):
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2):
        publisher.publish(offer(states[version]))
    publisher.publish(offer(states[3]), base_version=1)
    with pytest.raises(ChainError, match="cannot resume"):
        Publisher(site.source, base_dir=write_checkpoint(tmp_path / "two", states[2]), base_version=2, resume=True)


def test_a_missing_link_is_named(site, offer, states):
    publisher = Publisher(site.source, base_dir=site.base)
    for version in (1, 2):
        publisher.publish(offer(states[version]))
    shutil.rmtree(site.source / "weight_v000001")
    with pytest.raises(MissingLinkError) as caught:
        Publisher(site.source, base_dir=site.base, resume=True)
    assert caught.value.version == 1


def test_another_base_than_the_streams_is_noticed(site, offer, states, tmp_path):
    """A delta against wrong old bytes would be refused by every reader."""
    Publisher(site.source, base_dir=site.base).publish(offer(states[1]))
    other = write_checkpoint(tmp_path / "other", changed(site.state, 99, names=["step"]))
    with pytest.raises(PublishError, match="the base is not version 0, which version 1 was made on") as caught:
        Publisher(site.source, base_dir=other, resume=True)
    assert (caught.value.tensor, caught.value.version, caught.value.path) == ("step", 0, str(other))


def test_a_damaged_newest_version_is_not_passed_over(site, offer, states):
    Publisher(site.source, base_dir=site.base).publish(offer(states[1]))
    (site.source / "weight_v000001" / INDEX_NAME).write_text("{")
    with pytest.raises(IndexFormatError):
        Publisher(site.source, base_dir=site.base, resume=True)


@pytest.mark.parametrize("encoding", ["xor", "gpusync"])
def test_one_version_from_two_directories(site, states, tmp_path, encoding):
    new = write_checkpoint(tmp_path / "new", states[1], shards=3)
    report = publish_directories(site.source, base_dir=site.base, new_dir=new, encoding=encoding)
    assert (report.version, report.kind, report.warnings) == (1, "delta", ())
    site.pull(1)
    assert site.local_state() == states[1]


def test_directories_one_after_another(site, states, tmp_path):
    """Each from the one before it, by its version, or from the stream."""
    dirs = [write_checkpoint(tmp_path / f"state{n}", state) for n, state in enumerate(states)]
    publish_directories(site.source, base_dir=dirs[0], new_dir=dirs[1])
    publish_directories(site.source, base_dir=dirs[1], new_dir=dirs[2], base_version=1)
    publish_directories(site.source, base_dir=dirs[0], new_dir=dirs[3], resume=True)
    # A shortcut, past what was published in between.
    report = publish_directories(site.source, base_dir=dirs[1], new_dir=dirs[4], base_version=1, version=4)
    assert (report.version, report.base_version) == (4, 1)
    assert receive(site.state, site.source, 3) == states[3]
    site.pull(4)
    assert site.local_state() == states[4]
    publish_directories(site.source, base_dir=None, new_dir=dirs[5], full=True, version=5)
    assert receive(site.state, site.source, 5) == states[5]
    assert json.loads((site.source / "weight_v000005" / "config.json").read_text()) == {"model_type": "tiny"}


def test_a_tensor_only_the_new_directory_has_is_left_out_with_a_warning(site, states, tmp_path):
    wider = {**states[1], "extra.weight": states[1]["step"]}
    report = publish_directories(site.source, base_dir=site.base, new_dir=write_checkpoint(tmp_path / "new", wider))
    assert "extra.weight" in report.warnings[0]
    assert receive(site.state, site.source, 1) == states[1]


def test_a_publisher_that_keeps_nothing_needs_a_base(site):
    with pytest.raises(PublishError, match="base_dir"):
        Publisher(site.source, keep_snapshot=False).publish({})


def test_tensors_above_the_window_are_read_in_windows(site, monkeypatch, tmp_path):
    """Above a size a tensor in a file is never read whole, and the result is the same."""
    monkeypatch.setattr("gpusync.publish.encode.WHOLE_BYTES", 1000)
    after = changed(site.state, 1)
    new = write_checkpoint(tmp_path / "new", after)
    real, sizes = np.empty, []

    def empty(shape, *args, **kwargs):
        sizes.append(shape if isinstance(shape, int) else 0)
        return real(shape, *args, **kwargs)

    monkeypatch.setattr(np, "empty", empty)
    publish_directories(site.source, base_dir=site.base, new_dir=new, encoding="xor")
    monkeypatch.undo()
    assert max(sizes) <= 1 << 20 < site.state["embed.weight"].data.size
    assert receive(site.state, site.source, 1) == after
