"""The journal: before it stands nothing moves, once it stands the move is finished from wherever it was left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync.errors import MirrorError
from gpusync.mirror import io
from support.checkpoints import State, changed, read_state, small_state
from support.slime import publish_delta, publish_full


class Stopped(BaseException):
    """The process is gone: nothing catches this."""


def steps_of(action: Callable[[], object]) -> list[str]:
    seen: list[str] = []
    with io.observed(lambda event: seen.append(f"{event.step} {event.path.name} {event.done}")):
        action()
    return seen


def stop_at(step: int) -> Callable[[io.Event], None]:
    left = iter(range(step, -1, -1))

    def observer(_: io.Event) -> None:
        if next(left, 0) == 0:
            raise Stopped

    return observer


def publish(site, kind: str) -> list[State]:
    states = [site.state, changed(site.state, 1)]
    if kind == "full":
        publish_full(site.source, 1, states[1])
    else:
        publish_delta(site.source, 1, *states, encoding=kind)
    states.append(changed(states[1], 2))
    publish_delta(site.source, 2, states[1], states[2], encoding="xor" if kind == "full" else kind)
    return states


@pytest.mark.parametrize(("kind", "stride"), [("xor", 1), ("overwrite", 7), ("full", 3)])
def test_a_pull_that_stops_at_any_step_is_made_good_by_the_next(make_site, kind: str, stride: int) -> None:
    """Every create, write, fsync, rename, unlink and mkdir, before and after; of other kinds than xor a sample."""
    site = make_site({name: small_state()[name] for name in ("layer.0.weight", "layer.0.codes", "step")})
    states = publish(site, kind)
    site.defaults["workers"] = 1
    site.pull(0)
    start = site.local.with_name("start")
    shutil.copytree(site.local, start)
    steps = steps_of(lambda: site.pull(1))
    assert len(steps) > 30
    for step in range(0, len(steps), stride):
        shutil.rmtree(site.local)
        shutil.copytree(start, site.local)
        with pytest.raises(Stopped), io.observed(stop_at(step)):
            site.pull(1)
        site.pull(2)
        assert read_state(site.local) == states[2], f"stopped at {steps[step]}"
        assert sorted(path.name for path in site.local.iterdir()) == sorted(path.name for path in start.iterdir())


def test_slimes_receiver_finds_no_version_while_files_may_be_torn(site) -> None:
    publish(site, "xor")
    site.pull(0)

    def check(event: io.Event) -> None:
        if event.step == "write" and event.path.suffix == ".safetensors":
            assert not (site.control / "state.json").exists()

    with io.observed(check):
        site.pull(1)
    assert (site.control / "state.json").exists()


HOSTILE = {
    "no JSON": lambda told: "{",
    "a list": lambda told: "[]",
    "names that lead out": lambda told: json.dumps({**told, "remove": ["../victim"], "install": ["../victim"]}),
    "a place that leads out": lambda told: json.dumps({**told, "install_from": "../../.."}),
    "a spool that is gone": lambda told: json.dumps({**told, "spools": {"999.spool": 5}}),
    "a file that is gone": lambda told: json.dumps({**told, "files": ["model-9.safetensors"]}),
    "an impossible version": lambda told: json.dumps({**told, "state": {**told["state"], "version": "-5"}}),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_journal_that_is_not_ours_is_given_up_and_obeyed_in_nothing(site, damage: str) -> None:
    """A disk that lost or made up something: the directory is seeded anew, and nothing outside it is touched."""
    states = publish(site, "xor")
    site.pull(0)
    victim = site.local.parent / "victim"
    victim.write_text("precious")

    def stop(event: io.Event) -> None:
        if event.done and event.step == "rename" and event.to is not None and event.to.name == "journal.json":
            raise Stopped

    with pytest.raises(Stopped), io.observed(stop):
        site.pull(1)
    journal = site.control / "journal.json"
    journal.write_text(HOSTILE[damage](json.loads(journal.read_text())))
    assert site.pull(1).seed == "base"
    assert site.local_state() == states[1]
    assert victim.read_text() == "precious"


def test_a_full_disk_says_what_was_needed(site, monkeypatch: pytest.MonkeyPatch) -> None:
    states = publish(site, "xor")
    site.pull(0)
    before = site.local_files()
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".spool"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(MirrorError, match="No space left") as caught:
            site.pull(1)
    assert str(caught.value.expected).startswith("room for ")
    assert site.local_files() == before
    site.pull(1)
    assert site.local_state() == states[1]


def test_write_durably_never_shows_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    io.write_durably(path, b"old")
    for step in range(100):
        try:
            with io.observed(stop_at(step)):
                io.write_durably(path, b"new")
            break
        except Stopped:
            assert path.read_bytes() in (b"old", b"new")
            path.write_bytes(b"old")
    assert step > 8
    assert path.read_bytes() == b"new"
