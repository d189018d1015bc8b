"""Eight processes at one local directory, each with a target of its own: no version is folded twice, nobody hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpusync import PullReport
from gpusync.errors import ChainError
from gpusync.mirror import io
from support.fork_server import Ended, ForkServer
from support.kill import Pull
from support.streams import Stream, check_local, few_tensors, write_stream

PROCESSES = 8
NEWEST = 6
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Together:
    """A pull that begins when `gate` appears and notes every move it decides on in `log`: its version."""

    pull: Pull
    gate: Path
    log: Path

    def __call__(self) -> PullReport:
        while not self.gate.exists():
            time.sleep(0.001)
        with io.observed(self._note):
            return self.pull()

    def _note(self, event: io.Event) -> None:
        if event.done and event.step == "rename" and event.to is not None and event.to.name == "journal.json":
            version = int(json.loads(event.to.read_bytes())["state"]["version"])
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, f"{version}\n".encode())
            os.close(fd)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return write_stream(tmp_path_factory.mktemp("stream"), "xor", few_tensors(), count=NEWEST)


@dataclass
class Race:
    """One start of all eight; `begin` lets them go."""

    processes: ForkServer
    root: Path
    pulls: list[Pull]

    def begin(self) -> list[int]:
        gate = self.root / "gate"
        pids = [self.processes.start(Together(pull, gate, self.root / "log")) for pull in self.pulls]
        gate.touch()
        return pids

    def join(self, pids: list[int]) -> list[Ended]:
        return [self.processes.wait(pid, timeout_s=JOIN_TIMEOUT_S) for pid in pids]

    @property
    def decided(self) -> list[int]:
        log = self.root / "log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []


def make_race(processes: ForkServer, stream: Stream, root: Path, rng: random.Random) -> tuple[Race, int | None]:
    """Random targets; a directory that is not there, or at the base, or at version 1 (returned)."""
    local = root / "local"
    before = rng.choice([None, 0, 1])
    if before is not None:
        stream.pull(local, before)()
    targets = [rng.randint(max(1, before or 0), NEWEST) for _ in range(PROCESSES)]
    return Race(processes, root, [stream.pull(local, target) for target in targets]), before


@pytest.mark.parametrize("seed", range(5))
def test_different_targets_at_once(processes, stream, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    race, before = make_race(processes, stream, tmp_path, rng)
    ended = race.join(race.begin())
    final = max(pull.target for pull in race.pulls)
    check_local(tmp_path / "local", stream, final, seed)
    moves = [end.value for end in ended if end.error is None and not end.value.shared and end.value.changed]
    assert race.decided == sorted({*race.decided})
    assert sorted(race.decided) == sorted(report.target_version for report in moves)
    assert sum(report.seed != "store" for report in moves) == (before is None)
    made = sorted(version for report in moves for version in report.chain)
    assert made == list(range((before or 0) + 1, final + 1)), "each version is folded once, and none is left out"
    for pull, end in zip(race.pulls, ended, strict=True):
        check_outcome(pull.target, end, served={before, *race.decided}, final=final)


def check_outcome(target: int, end: Ended, *, served: set[int | None], final: int) -> None:
    if end.error is None:
        assert end.value.target_version == target
        assert target in served
    else:
        assert isinstance(end.error, ChainError), end.error
        assert "behind" in str(end.error)
        assert target < final


@pytest.mark.parametrize("seed", range(5))
def test_some_of_them_are_killed(processes, stream, tmp_path: Path, seed: int) -> None:
    """Whoever dies with the lock lets it go; the others finish his move, and their own."""
    rng = random.Random(100 + seed)
    race, _ = make_race(processes, stream, tmp_path, rng)
    pids = race.begin()
    victims = rng.sample(range(PROCESSES), 3)
    for victim in victims:
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pids[victim], signal.SIGKILL)
    ended = race.join(pids)
    for number, (pull, end) in enumerate(zip(race.pulls, ended, strict=True)):
        if end.was_killed:
            assert number in victims
        else:  # what a victim had decided on when it died may not stand in the log
            check_outcome(pull.target, end, served=set(range(NEWEST + 1)), final=NEWEST)
    assert processes.run(stream.pull(tmp_path / "local", NEWEST)).error is None
    check_local(tmp_path / "local", stream, NEWEST, seed)
