"""A trainer that does not stand still while its tensors are published: a version is one that every reader applies."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gpusync.publish.encode
from gpusync.publish import Publisher, StoredBytes
from gpusync.publish.changes import differs
from support.checkpoints import Tensor, changed


def live_copy(state):
    return {name: Tensor(t.dtype, t.shape, t.data.copy()) for name, t in state.items()}


def as_offers(live):
    return {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in live.items()}


@pytest.mark.parametrize("moment", ["differs", "find_change", "new_digest", "payload_checksum", "write_shard"])
@pytest.mark.parametrize("kind", ["xor", "overwrite", "gpusync", "full"])
def test_what_changes_between_two_looks_is_one_state_or_the_other(site, monkeypatch, kind, moment):
    """The trainer takes its next step at a step of the publisher; what is published then is a state all the same."""
    first, second = changed(site.state, 1), changed(site.state, 2)
    live = live_copy(first)
    module = gpusync.publish.shards if moment == "write_shard" else gpusync.publish.encode
    real = getattr(module, moment)

    def step() -> None:
        for name, t in second.items():
            live[name].data[:] = t.data

    def step_then(*args, **kwargs):
        step()
        return real(*args, **kwargs)

    publisher = Publisher(site.source, base_dir=site.base, encoding="xor" if kind == "full" else kind, workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, moment, step_then)
        (publisher.publish_full if kind == "full" else publisher.publish)(as_offers(live))
    site.pull(1)
    for name, t in site.local_state().items():
        assert t in (first[name], second[name]), name
    step()
    publisher.publish(as_offers(live))
    site.pull(2)
    assert site.local_state() == second


@pytest.mark.parametrize("keep", [True, False])
def test_a_trainer_that_writes_all_the_time(site, keep):
    live = live_copy(site.state)
    stop = threading.Event()

    def train() -> None:
        rng = np.random.default_rng(5)
        while not stop.is_set():
            for t in live.values():
                if t.data.size:
                    t.data[rng.integers(t.data.size)] ^= 1

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        publisher = Publisher(site.source, base_dir=site.base, keep_snapshot=keep)
        for version in range(1, 5):
            (publisher.publish_full if version == 3 else publisher.publish)(as_offers(live))
            site.pull(version)
    finally:
        stop.set()
        trainer.join()
    publisher.publish(as_offers(live))
    site.pull(5)
    assert site.local_state() == live


def test_unchanged_tensors_are_not_copied(site, monkeypatch):
    """What is found unchanged is compared once, and neither copied nor compared in detail."""
    compared: list[int] = []
    real = gpusync.publish.encode.find_change

    def find_change(old, new, *, keep):
        compared.append(new.nbytes)
        return real(old, new, keep=keep)

    monkeypatch.setattr(gpusync.publish.encode, "find_change", find_change)
    after = changed(site.state, 1, names=["step"])
    report = Publisher(site.source, base_dir=site.base).publish(as_offers(live_copy(after)))
    assert report.tensors_changed == 1
    assert compared == [after["step"].data.nbytes]


@pytest.mark.parametrize("at", [None, 0, (1 << 20) - 1, 1 << 20, (1 << 20) + 2])
def test_states_differ_in_any_byte(at):
    old = np.zeros((1 << 20) + 3, np.uint8)
    new = old.copy()
    if at is not None:
        new[at] = 1
    assert differs(old, new) == (at is not None)
