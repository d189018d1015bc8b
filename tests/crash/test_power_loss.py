"""Power fails at a random step of a random history of pulls, and any unsynced page or name may be lost.

What comes up again is a version that had been reported, or a later one that was being made; never a torn one. This is
shown without the stream, so that nothing can be fetched anew. Then, with the stream, the next pull succeeds.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpusync.errors import ChainError, GpusyncError, VersionMissingError
from gpusync.mirror import io
from support.powerloss import PowerCut, Recorder
from support.streams import Stream, check_local, said_version, tiny_tensors, write_stream

KINDS = ["xor", "overwrite", "full", "gpusync"]
CASES = 500
CASES_A_HISTORY = 20
NEWEST = 5
STEPS_OF_A_PULL = 140


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    return {
        kind: write_stream(tmp_path_factory.mktemp(kind), kind, tiny_tensors(), count=NEWEST, share=0.05)
        for kind in KINDS
    }


@dataclass
class History:
    """Pulls of one local directory, recorded. `started` and the recorder's reports are (step, version)."""

    stream: Stream
    local: Path
    recorder: Recorder
    started: list[tuple[int, int]]

    def pull(self, target: int, **options: object) -> None:
        self.started.append((len(self.recorder.log), target))
        with io.observed(self.recorder):
            self.stream.pull(self.local, target, **options)()
        self.recorder.report(target)

    def allowed_at(self, step: int, before: frozenset[int | None]) -> frozenset[int | None]:
        """The versions that may come up: the last one reported, or any whose making began after that."""
        reports = [(when, version) for when, version in self.recorder.reports if when <= step]
        since, base = (reports[-1][0], frozenset({reports[-1][1]})) if reports else (0, before)
        return base | {version for when, version in self.started if since <= when <= step}


def new_history(stream: Stream, local: Path) -> History:
    return History(stream, local, Recorder(local.parent), [])


def record_history(rng: random.Random, stream: Stream, root: Path) -> tuple[History, frozenset[int | None]]:
    """One to three pulls, upwards or back to 0; some are killed on the way. And what the directory held before them."""
    root.mkdir()
    local = root / "local"
    before: int | None = None
    if rng.random() < 0.7:
        before = rng.randint(0, 2)
        stream.pull(local, before)()
    history, least = new_history(stream, local), before or 0
    for _ in range(rng.randint(1, 3)):
        target = least = 0 if rng.random() < 0.1 else rng.randint(min(least + 1, NEWEST), NEWEST)
        if rng.random() < 0.5:
            kill_somewhere(rng, history.recorder)
        with suppress(PowerCut, ChainError):  # a pull back to 0 that was killed leaves a higher version
            history.pull(target, workers=rng.choice([1, 2]))
        history.recorder.go_on()
    return history, frozenset({before})


def kill_somewhere(rng: random.Random, recorder: Recorder) -> None:
    """At any step, or just after a change of entries: the next pull finds it done, but not synced."""
    if rng.random() < 0.5:
        recorder.stop_at(rng.randint(1, STEPS_OF_A_PULL))
    else:
        recorder.stop_at(rng.randint(1, 12), only=("mkdir", "rename", "unlink"))


def choose_step(rng: random.Random, history: History) -> int:
    """Any step, or one of the first of a pull: what the process before it left unsynced may still be lost then."""
    last = len(history.recorder.log)
    if rng.random() < 0.5:
        return rng.randint(0, last)
    return min(last, rng.choice(history.started)[0] + rng.randint(0, 20))


def fail_power(rng: random.Random, history: History, allowed: frozenset, root: Path) -> tuple[Path, frozenset]:
    """A directory as it may be found after a power loss at a random step, and the versions that may come up."""
    step = choose_step(rng, history)
    root.mkdir()
    history.recorder.disk_after(step).survive(root, rng)
    return root / "local", history.allowed_at(step, allowed)


def check_recovery(local: Path, stream: Stream, allowed: frozenset, note: str) -> None:
    nowhere = local.parent / "nothing published"
    nowhere.mkdir()
    with pytest.raises(VersionMissingError):
        Stream(base=stream.base, source=nowhere, states=stream.states).pull(local, NEWEST + 1)()
    version = said_version(local)
    assert version in allowed, f"{note}: {version} came up instead of one of {allowed}"
    if version is not None:
        check_local(local, stream, version, note)
    report = stream.pull(local, NEWEST)()
    if version is not None:
        kept = report.shared or not report.changed if version == NEWEST else "local checkpoint" not in report.reason
        assert kept, f"{note}: {report}"
    check_local(local, stream, NEWEST, note)


def run_case(rng: random.Random, history: History, before: frozenset, root: Path, note: str) -> None:
    root.mkdir()
    local, allowed = fail_power(rng, history, before, root / "once")
    if rng.random() < 0.3:
        again = new_history(history.stream, local)
        again.pull(NEWEST)
        local, allowed = fail_power(rng, again, allowed, root / "twice")
        note += ", and again while recovering"
    check_recovery(local, history.stream, allowed, note)
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES // CASES_A_HISTORY))
def test_a_reported_version_survives_a_power_loss(streams, no_waiting, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    history, before = record_history(rng, streams[kind], tmp_path / "recorded")
    for case in range(CASES_A_HISTORY):
        run_case(rng, history, before, tmp_path / str(case), f"{kind}, seed {seed}, case {case}")


def without_syncs(of: Callable[[Path], bool]) -> dict[str, Callable]:
    real = io.WritableFile.fsync
    return {"WritableFile.fsync": lambda file: None if of(file.path) else real(file)}


def write_in_place(path: Path, data: bytes) -> None:
    io.unlink(path)
    with io.WritableFile(path, create=True) as file:
        file.append(data)
        file.fsync()
    io.fsync_directory(path.parent)


BREAKAGES: dict[str, dict[str, Callable]] = {
    "shards are not synced after a scatter": without_syncs(lambda path: path.parent.name == "local"),
    "spools are not synced": without_syncs(lambda path: path.suffix == ".spool"),
    "shards are not synced after they were copied": without_syncs(lambda path: path.parent.name == "incoming"),
    "the journal is not synced": without_syncs(lambda path: path.name == "journal.json.tmp"),
    "the state is not synced": without_syncs(lambda path: path.name == "state.json.tmp"),
    "directories are not synced": {"fsync_directory": lambda _: None},
    "small files are written in place": {"write_durably": write_in_place},
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_protocol_is_caught(streams, no_waiting, monkeypatch, tmp_path: Path, breakage: str) -> None:
    """The same cases as above, few of them, find each of these out: what they say of the right protocol has weight."""
    for name, broken in BREAKAGES[breakage].items():
        monkeypatch.setattr(f"gpusync.mirror.io.{name}", broken)
    rng = random.Random(breakage)
    for attempt in range(100):
        kind = rng.choice(["xor", "full"])
        try:
            history, before = record_history(rng, streams[kind], tmp_path / f"recorded {attempt}")
            for case in range(CASES_A_HISTORY // 4):
                run_case(rng, history, before, tmp_path / f"{attempt}-{case}", breakage)
        except (AssertionError, GpusyncError, OSError, ValueError):
            return
    pytest.fail(f"nothing noticed that {breakage}")


@pytest.mark.parametrize("start", ["fresh", "lagging", "linked"])
def test_what_a_killed_process_left_unsynced_is_not_relied_on(streams, no_waiting, tmp_path: Path, start: str) -> None:
    """A kill after every change of an entry; then the power fails while the next process begins, or when it is done."""
    rng, stream = random.Random(f"unsynced {start}"), streams["xor"]
    for kill in range(1, 100):
        local = tmp_path / str(kill) / "local"
        local.parent.mkdir()
        if start != "fresh":
            stream.pull(local, 1)()
        if start == "linked":
            move_behind_links(local, tmp_path / f"hub {kill}")
        history = new_history(stream, local)
        history.recorder.stop_at(kill, only=("mkdir", "rename", "unlink", "rmtree"))
        try:
            history.pull(4)
            break
        except PowerCut:
            history.recorder.go_on()
        history.pull(4)
        began, end = history.started[1][0], len(history.recorder.log)
        for step in [*range(began, began + 9), end]:
            for survival in range(5 if step == end else 1):
                (root := tmp_path / "survived").mkdir()
                history.recorder.disk_after(step).survive(root, rng)
                allowed = history.allowed_at(step, frozenset({None if start == "fresh" else 1}))
                note = f"killed after change {kill}, power lost {step - began} steps later, {survival}"
                check_recovery(root / "local", stream, allowed, note)
                shutil.rmtree(root)
    assert kill > 10


def move_behind_links(local: Path, hub: Path) -> None:
    hub.mkdir()
    for shard in local.glob("*.safetensors"):
        shard.symlink_to(shard.rename(hub / shard.name))
