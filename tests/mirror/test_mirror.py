"""The mirror written behind: what is accepted is durable, folds follow, and nobody waits for nothing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusync import Publisher
from gpusync.errors import DigestMismatchError, MirrorError, PayloadError, StreamError, VersionMissingError
from gpusync.mirror import inbox as boxes
from gpusync.mirror import io
from gpusync.mirror.lock import local_lock
from gpusync.mirror.mirror import Mirror
from gpusync.publish import StoredBytes
from support.checkpoints import State, changed, read_state
from support.slime import publish_delta, publish_full, version_dir

WAIT_S = 30


def published(site, count: int) -> list[State]:
    states = [site.state]
    for version in range(1, count + 1):
        states.append(changed(states[-1], version))
        publish_delta(site.source, version, *states[-2:], encoding=("xor", "overwrite")[version % 2])
    return states


@pytest.fixture
def open_mirror(site) -> Iterator:
    mirrors = []

    def make(**options) -> Mirror:
        mirrors.append(
            Mirror(site.local, base_dir=site.base, source_dir=site.source, workers=1, lock_timeout=WAIT_S, **options)
        )
        return mirrors[-1]

    yield make
    for mirror in mirrors:
        mirror.close()


def bring(mirror: Mirror, version: int) -> None:
    mirror.receive(version)
    mirror.accept(version)


def test_an_accepted_version_is_folded_behind(site, open_mirror) -> None:
    states = published(site, 3)
    mirror = open_mirror()
    assert mirror.status().durable_version is None
    for version in (1, 3):
        bring(mirror, version)
        assert mirror.status().durable_version == version
        mirror.flush(WAIT_S)
        assert site.local_state() == states[version]
        assert mirror.status().folded_version == version
    assert json.loads((site.control / "state.json").read_text())["version"] == "000003"


class TestOfAHelper:
    """`in_process=False`: the folds are another process's."""

    def test_it_folds_at_a_lower_priority_and_ends_with_the_mirror(self, site, open_mirror) -> None:
        states = published(site, 2)
        mirror = open_mirror(in_process=False)
        for version in (1, 2):
            bring(mirror, version)
            mirror.flush(WAIT_S)
            assert site.local_state() == states[version]
        helper = mirror._folds.helper_pid
        assert os.getpriority(os.PRIO_PROCESS, helper) > os.getpriority(os.PRIO_PROCESS, 0)
        mirror.close()
        assert mirror._folds.helper_pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(helper, 0)

    def test_its_errors_are_those_of_the_fold(self, site, open_mirror) -> None:
        states = published(site, 1)
        mirror = open_mirror(in_process=False)
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        publish_delta(site.source, 2, states[1], changed(states[1], 2), checksums={"step": "0" * 32})
        bring(mirror, 2)
        with pytest.raises(MirrorError, match="step") as caught:
            mirror.flush(WAIT_S)
        assert isinstance(caught.value.__cause__, DigestMismatchError)
        assert (caught.value.__cause__.tensor, caught.value.__cause__.version) == ("step", 2)
        assert site.local_state() == states[1]

    def test_one_that_is_killed_is_followed_by_another(self, site, open_mirror) -> None:
        states = published(site, 2)
        mirror = open_mirror(in_process=False)
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        helper = mirror._folds.helper_pid
        with local_lock(site.control, timeout_s=WAIT_S):  # where the fold waits
            bring(mirror, 2)
            time.sleep(0.2)
            os.kill(helper, signal.SIGKILL)
            time.sleep(0.2)
        mirror.flush(WAIT_S)
        assert site.local_state() == states[2]
        assert mirror._folds.helper_pid not in (None, helper)

    def test_when_the_other_is_killed_too_it_is_told(self, site, open_mirror) -> None:
        states = published(site, 2)
        mirror = open_mirror(in_process=False)
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        with local_lock(site.control, timeout_s=WAIT_S):
            bring(mirror, 2)
            for _ in range(2):
                while (helper := mirror._folds.helper_pid) is None:
                    time.sleep(0.01)
                time.sleep(0.2)
                os.kill(helper, signal.SIGKILL)
                while mirror._folds.helper_pid == helper:
                    time.sleep(0.01)
            with pytest.raises(MirrorError, match="the helper that folds ended"):
                mirror.flush(WAIT_S)
        mirror.flush(WAIT_S)
        assert site.local_state() == states[2]

    def test_it_ends_with_a_process_that_is_killed(self, site) -> None:
        states = published(site, 2)
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_fold_in_a_helper, args=(site.local, site.base, site.source, sending))
        process.start()
        helper = receiving.recv()
        process.kill()
        process.join(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while Path(f"/proc/{helper}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{helper}").exists()
        with Mirror(site.local, base_dir=site.base, source_dir=site.source, lock_timeout=WAIT_S) as mirror:
            bring(mirror, 2)
            mirror.flush(WAIT_S)
        assert site.local_state() == states[2]


def _fold_in_a_helper(local: Path, base: Path, source: Path, told) -> None:
    mirror = Mirror(local, base_dir=base, source_dir=source, workers=1, in_process=False)
    bring(mirror, 1)
    mirror.flush(WAIT_S)
    told.send(mirror._folds.helper_pid)
    time.sleep(WAIT_S)


def test_what_is_accepted_survives_the_stream_and_the_process(site, open_mirror) -> None:
    """Accepted, not folded, and the version directory is gone: another process still comes to the right bytes."""
    states = published(site, 3)
    mirror = open_mirror()
    bring(mirror, 1)
    mirror.flush(WAIT_S)
    mirror.hold(2)
    bring(mirror, 3)
    mirror.close()
    assert read_state(site.local) == states[1]
    shutil.rmtree(version_dir(site.source, 2))
    shutil.rmtree(version_dir(site.source, 3))
    other = open_mirror()
    assert other.status().durable_version == 3
    other.flush(WAIT_S)
    assert site.local_state() == states[3]


def test_candidates_do_not(site, open_mirror) -> None:
    states = published(site, 2)
    mirror = open_mirror(keep_versions=0)
    bring(mirror, 1)
    mirror.receive(2)
    mirror.close()
    other = open_mirror(keep_versions=0)
    other.flush(WAIT_S)
    assert other.status().durable_version == 1
    assert site.local_state() == states[1]
    assert list((site.control / "inbox").iterdir()) == []
    with pytest.raises(MirrorError, match="must be received"):
        other.accept(2)


def test_discarding_leaves_the_accepted_ones(site, open_mirror) -> None:
    published(site, 3)
    mirror = open_mirror()
    mirror.hold(1)
    bring(mirror, 1)
    mirror.receive(3)
    mirror.discard(3)
    mirror.discard(3)
    assert mirror.status().durable_version == 1
    assert mirror.status().lag_versions == 1
    mirror.receive(2)
    mirror.accept(2)
    assert mirror.status().lag_versions == 2


def test_several_pending_versions_fold_in_one_pass(site, open_mirror) -> None:
    states = published(site, 5)
    site.pull(0)
    mirror = open_mirror()
    mirror.hold(1)
    for version in range(1, 6):
        bring(mirror, version)
    assert mirror.status().lag_versions == 5
    assert mirror.status().lag_bytes > 0
    decided: list[Path] = []
    written: list[int] = []

    def watch(event: io.Event) -> None:
        if event.done and event.step == "rename" and event.to is not None and event.to.name == "journal.json":
            decided.append(event.to)
        if event.done and event.step == "write" and event.path.parent == site.local:
            written.append(len(event.data))

    with io.observed(watch):
        mirror.release(1)
        mirror.flush(WAIT_S)
    assert len(decided) == 1
    assert sum(written) <= sum(t.data.size for t in site.state.values())
    assert site.local_state() == states[5]


def test_a_held_version_is_not_folded_and_those_before_it_are(site, open_mirror) -> None:
    states = published(site, 3)
    mirror, other = open_mirror(), open_mirror()
    other.hold(3)
    for version in (1, 2, 3):
        bring(mirror, version)
    deadline = time.monotonic() + WAIT_S
    while mirror.status().lag_versions > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(MirrorError, match=f"process {os.getpid()} on .* holds version 3"):
        mirror.flush(0.2)
    assert site.local_state() == states[2]
    assert mirror.status().held == 3
    other.release(3)
    mirror.flush(WAIT_S)
    assert site.local_state() == states[3]


def test_the_disk_path_folds_what_is_pending_and_waits_for_holders(site, open_mirror) -> None:
    states = published(site, 3)
    mirror = open_mirror()
    mirror.hold(1)
    bring(mirror, 2)
    with pytest.raises(MirrorError, match="holds a version prepared"):
        site.pull(3, lock_timeout=0.2)
    mirror.close()
    shutil.rmtree(version_dir(site.source, 2))
    assert site.pull(3).chain == (3,)
    assert site.local_state() == states[3]


class TestFullVersions:
    def test_a_full_version_is_copied_once_and_put_in_place_by_renames(self, site, open_mirror) -> None:
        states = published(site, 1)
        mirror = open_mirror()
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        full = changed(states[1], 7)
        publish_full(site.source, 2, full, files={"tokenizer.json": "new", "run.py": "code"})
        later = changed(full, 8)
        publish_delta(site.source, 3, full, later)
        written: list[str] = []
        with io.observed(lambda e: written.append(e.path.name) if e.done and e.step == "write" else None):
            mirror.hold(3)
            bring(mirror, 3)
            deadline = time.monotonic() + WAIT_S
            while mirror.status().lag_versions > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert site.local_state() == full
        assert (site.local / "tokenizer.json").read_text() == "new"
        assert not (site.local / "run.py").exists()
        sizes = {path.name: len(path.read_bytes()) for path in site.local.glob("*.safetensors")}
        assert all(written.count(name) <= 2 + len(site.state) for name in sizes)
        mirror.release(3)
        mirror.flush(WAIT_S)
        assert site.local_state() == later

    def test_pending_versions_before_a_full_one_are_skipped(self, site, open_mirror) -> None:
        states = published(site, 2)
        mirror = open_mirror()
        mirror.hold(1)
        bring(mirror, 2)
        full = changed(states[2], 9)
        publish_full(site.source, 3, full)
        bring(mirror, 3)
        mirror.release(1)
        mirror.flush(WAIT_S)
        assert site.local_state() == full


def test_a_restarted_stream_replaces_what_was_pending(site, open_mirror) -> None:
    published(site, 3)
    mirror = open_mirror()
    mirror.hold(1)
    bring(mirror, 3)
    shutil.rmtree(site.source)
    site.source.mkdir()
    new = changed(site.state, 50, names=["step", "layer.1.weight"])
    publish_delta(site.source, 1, site.state, new)
    plan = mirror.receive(1)
    assert (plan.seed, plan.chain) == ("base", (1,))
    mirror.accept(1)
    mirror.release(1)
    mirror.flush(WAIT_S)
    assert site.local_state() == new


def test_damaged_files_are_seeded_anew_up_to_the_accepted_version(site, open_mirror) -> None:
    states = published(site, 3)
    mirror = open_mirror()
    bring(mirror, 2)
    mirror.flush(WAIT_S)
    path = site.local / "model-00001-of-00002.safetensors"
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    bring(mirror, 3)
    mirror.flush(WAIT_S)
    assert site.local_state() == states[3]


class TestErrors:
    def test_a_fold_that_fails_surfaces_on_the_next_call_and_is_tried_again(
        self, site, open_mirror, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = published(site, 2)
        mirror = open_mirror()
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        real, full_disk = os.pwrite, [True]

        def pwrite(fd: int, data, offset: int) -> int:
            if full_disk[0] and os.readlink(f"/proc/self/fd/{fd}").endswith(".spool"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        bring(mirror, 2)
        with pytest.raises(MirrorError, match=r"a fold behind failed: .*No space left"):
            mirror.flush(WAIT_S)
        assert site.local_state() == states[1]
        assert "No space left" in str(mirror.status().last_error)
        assert mirror.status().durable_version == 2
        full_disk[0] = False
        try:
            mirror.flush(WAIT_S)
        except MirrorError:  # the retry that the first error asked for may have failed before space came back
            mirror.flush(WAIT_S)
        assert site.local_state() == states[2]
        assert mirror.status().last_error is None

    def test_a_version_that_cannot_be_copied_leaves_nothing(
        self, site, open_mirror, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published(site, 1)
        mirror = open_mirror()
        real = os.pwrite

        def pwrite(fd: int, data, offset: int) -> int:
            if "/inbox/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(MirrorError, match="No space left") as caught:
                mirror.receive(1)
        assert str(caught.value.expected).startswith("room for ")
        assert list((site.control / "inbox").iterdir()) == []
        bring(mirror, 1)

    def test_a_missing_version(self, open_mirror) -> None:
        with pytest.raises(VersionMissingError):
            open_mirror().receive(1)

    def test_a_full_version_with_a_wrong_checksum(self, site, open_mirror) -> None:
        publisher = Publisher(site.source, base_dir=site.base)
        publisher.publish_full(
            {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in site.state.items()}
        )
        path = next(version_dir(site.source, 1).glob("*.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
        mirror = open_mirror()
        with pytest.raises(DigestMismatchError):
            mirror.receive(1)
        assert list((site.control / "inbox").iterdir()) == []

    def test_receive_waits_for_room_and_says_what_is_in_the_way(self, site, open_mirror) -> None:
        published(site, 2)
        mirror = open_mirror(inbox_bytes=1)
        mirror._lock_timeout = 0.2
        mirror.hold(1)
        bring(mirror, 1)
        with pytest.raises(MirrorError, match=r"no room for \d+ bytes: process \d+ on"):
            mirror.receive(2)
        mirror.release(1)
        bring(mirror, 2)
        mirror.flush(WAIT_S)


class TestSeveralHands:
    """What other threads and processes accept, fold and pull in between changes no outcome for the worse."""

    def full_versions(self, site, *versions: int) -> dict[int, State]:
        states = {version: changed(site.state, 70 + version) for version in versions}
        for version, state in states.items():
            publish_full(site.source, version, state)
        return states

    def test_an_older_full_version_does_not_undo_a_newer_one(self, site, open_mirror) -> None:
        states = self.full_versions(site, 5, 7)
        one, two = open_mirror(), open_mirror()
        one.receive(5)
        bring(two, 7)
        two.flush(WAIT_S)
        with pytest.raises(MirrorError, match="led elsewhere"):
            one.accept(5)
        assert two.status().durable_version == 7
        assert site.local_state() == states[7]

    def test_a_full_version_accepted_while_an_older_one_is_put_in_place(self, site, open_mirror) -> None:
        states = self.full_versions(site, 7, 9)
        mirror = open_mirror()
        decided, go_on = threading.Event(), threading.Event()

        def slow_disk(event: io.Event) -> None:
            if event.done and event.step == "rename" and event.to is not None and event.to.name == "journal.json":
                decided.set()
                go_on.wait(WAIT_S)

        with io.observed(slow_disk):
            bring(mirror, 7)
            assert decided.wait(WAIT_S)
            mirror.receive(9)
            accepting = threading.Thread(target=mirror.accept, args=(9,))
            accepting.start()
            go_on.set()
            accepting.join(WAIT_S)
            mirror.flush(WAIT_S)
        assert site.local_state() == states[9]

    def test_a_pull_past_what_is_accepted_meanwhile_stays(self, site, open_mirror) -> None:
        states = self.full_versions(site, 5, 7)
        site.pull(0)
        mirror = open_mirror()
        site.pull(7, pre_read_hook=lambda *_: bring(mirror, 5))
        mirror.flush(WAIT_S)
        assert mirror.status().durable_version == 7
        assert site.local_state() == states[7]

    def test_a_hold_taken_while_a_fold_runs_keeps_what_comes_after(self, site, open_mirror) -> None:
        states = published(site, 3)
        site.pull(1)
        mirror = open_mirror()
        once: list[int] = []

        def hold_and_accept(event: io.Event) -> None:
            if event.step == "create" and event.path.suffix == ".spool" and not once:
                once.append(3)
                mirror.hold(3)
                bring(mirror, 3)

        with io.observed(hold_and_accept):
            bring(mirror, 2)
            deadline = time.monotonic() + WAIT_S
            while mirror.status().folded_version != 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
        assert site.local_state() == states[2]
        mirror.release(3)
        mirror.flush(WAIT_S)
        assert site.local_state() == states[3]


class TestWrongVersions:
    def test_version_zero_is_not_received(self, open_mirror) -> None:
        with pytest.raises(MirrorError, match="version 0"):
            open_mirror().receive(0)

    def test_a_payload_that_is_not_what_the_index_says(self, site, open_mirror) -> None:
        publisher = Publisher(site.source, base_dir=site.base)
        new = changed(site.state, 1)
        publisher.publish({n: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for n, t in new.items()})
        path = next(version_dir(site.source, 1).glob("*.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 1
        path.write_bytes(raw)
        mirror = open_mirror()
        with pytest.raises(PayloadError):
            mirror.receive(1)
        assert list((site.control / "inbox").iterdir()) == []

    def test_what_was_accepted_and_is_wrong_is_told_and_stands_in_nobodys_way(self, site, open_mirror) -> None:
        states = published(site, 1)
        mirror = open_mirror()
        bring(mirror, 1)
        mirror.flush(WAIT_S)
        publish_delta(site.source, 2, states[1], changed(states[1], 2), checksums={"step": "0" * 32})
        bring(mirror, 2)
        with pytest.raises(MirrorError, match="step"):
            mirror.flush(WAIT_S)
        assert site.local_state() == states[1]
        full = changed(states[1], 3)
        publish_full(site.source, 3, full)
        bring(mirror, 3)
        mirror.flush(WAIT_S)
        assert site.local_state() == full

    def test_a_source_that_grows_while_it_is_read_fills_no_disk(
        self, site, open_mirror, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published(site, 1)
        mirror = open_mirror()
        path = next(version_dir(site.source, 1).glob("*.safetensors"))
        real = boxes.copy_delta

        def grown(version, **options):
            os.truncate(path, 2**33)
            return real(version, **options)

        monkeypatch.setattr(boxes, "copy_delta", grown)
        with pytest.raises(StreamError, match="changed while it was read"):
            mirror.receive(1)
        assert list((site.control / "inbox").iterdir()) == []


def test_a_closed_mirror_says_so(site, open_mirror) -> None:
    published(site, 1)
    mirror = open_mirror()
    mirror.close()
    for call in (lambda: mirror.receive(1), lambda: mirror.accept(1), lambda: mirror.flush(1)):
        with pytest.raises(MirrorError, match="closed"):
            call()


def test_folded_payloads_are_kept_within_a_budget(site, open_mirror) -> None:
    published(site, 5)
    mirror = open_mirror(keep_versions=2)
    for version in range(1, 6):
        bring(mirror, version)
        mirror.flush(WAIT_S)
    mirror.close()
    kept = [path.name for place in (site.control / "inbox").iterdir() for path in place.iterdir()]
    assert sorted(kept) == ["weight_v000004", "weight_v000005"]


def test_two_mirrors_of_one_directory(site, open_mirror) -> None:
    """Two engines: each brings its versions, what both bring counts once, and what moved on is told."""
    states = published(site, 4)
    one, two = open_mirror(), open_mirror()
    one.hold(1)
    one.receive(1)
    two.receive(2)
    two.accept(2)
    one.accept(1)
    assert one.status() == two.status()
    assert one.status().durable_version == 2
    one.receive(3)
    two.receive(4)
    two.accept(4)
    one.accept(3)
    one.release(1)
    two.flush(WAIT_S)
    assert site.local_state() == states[4]


def _hold_forever(local: Path, base: Path, source: Path, ready) -> None:
    mirror = Mirror(local, base_dir=base, source_dir=source, workers=1)
    mirror.hold(1)
    bring(mirror, 1)
    mirror.receive(2)
    ready.set()
    signal.pause()


def test_a_dead_process_holds_nothing_and_its_candidates_go(site, open_mirror) -> None:
    states = published(site, 2)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_hold_forever, args=(site.local, site.base, site.source, ready))
    child.start()
    assert ready.wait(60)
    mirror = open_mirror()
    assert mirror.status().held == 1
    os.kill(int(child.pid or 0), signal.SIGKILL)
    child.join()
    mirror.flush(WAIT_S)
    assert site.local_state() == states[1]
    open_mirror()
    places = [path.name for place in (site.control / "inbox").iterdir() for path in place.iterdir()]
    assert places == ["weight_v000001"]
