"""SIGKILL at every step of a pull, and at any time: the next pull, in a new process, brings every byte right."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.kill import KilledAt, Point, PointsOf, Pull, Unsynced
from support.streams import Stream, check_local, few_tensors, write_stream

KINDS = ["xor", "overwrite", "full", "gpusync"]
TARGET, NEWEST = 4, 5
SAMPLE = 10
RANDOM_KILLS = int(os.environ.get("GPUSYNC_RANDOM_KILLS", "40"))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    return {kind: write_stream(tmp_path_factory.mktemp(kind), kind, few_tensors(), count=NEWEST) for kind in KINDS}


class Bench:
    """One stream, one starting state of the local directory, and as many tries from it as wanted."""

    def __init__(self, processes: ForkServer, stream: Stream, root: Path, *, lagging: bool) -> None:
        self.processes = processes
        self.stream = stream
        self.local, self._start = root / "local", root / "start"
        self._start.mkdir()
        if lagging:
            stream.pull(self._start, TARGET - 3)()

    def reset(self) -> None:
        shutil.rmtree(self.local, ignore_errors=True)
        if any(self._start.iterdir()):
            shutil.copytree(self._start, self.local)

    def points(self) -> list[Point]:
        self.reset()
        return self.processes.run(Unsynced(PointsOf(self.pull, self.local))).value

    @property
    def pull(self) -> Pull:
        return self.stream.pull(self.local, TARGET)

    def usual_seconds(self, **options: object) -> float:
        self.reset()
        began = time.monotonic()
        assert self.processes.run(self.stream.pull(self.local, TARGET, **options)).error is None
        return time.monotonic() - began

    def try_point(self, point: Point, *, then: int) -> None:
        self.reset()
        killed = self.processes.run(Unsynced(KilledAt(self.pull, self.local, point)))
        assert killed.was_killed, f"{point}: {killed}"
        self.check_next(then, point)

    def check_next(self, then: int, note: object) -> None:
        after = self.processes.run(Unsynced(self.stream.pull(self.local, then)))
        assert after.error is None, f"{note}: {after.error}"
        check_local(self.local, self.stream, then, note)


@pytest.mark.parametrize("lagging", [False, True], ids=["fresh", "lagging"])
def test_killed_at_every_step(processes, streams, tmp_path: Path, lagging: bool) -> None:
    bench = Bench(processes, streams["xor"], tmp_path, lagging=lagging)
    points = bench.points()
    assert len({point.name for point in points}) >= 30
    sides = {point.name.split()[0] for point in points}
    steps = {point.name.split()[1] for point in points}
    assert sides == {"before", "inside", "after"}
    assert steps >= {"create", "write", "fsync", "rename", "unlink", "mkdir", "rmtree", "fsync_dir"}
    if lagging:
        scatter = [point for point in points if point.name.startswith("after write model-")]
        assert max(point.of for point in scatter) >= 3, "no point in the middle of a scatter"
    for number, point in enumerate(points):
        bench.try_point(point, then=(TARGET, NEWEST)[number % 2])


@pytest.mark.parametrize("lagging", [False, True], ids=["fresh", "lagging"])
@pytest.mark.parametrize("kind", ["overwrite", "full", "gpusync"])
def test_killed_at_some_steps(processes, streams, tmp_path: Path, kind: str, lagging: bool) -> None:
    bench = Bench(processes, streams[kind], tmp_path, lagging=lagging)
    rng = random.Random(f"{kind} {lagging}")
    for point in rng.sample(bench.points(), SAMPLE):
        bench.try_point(point, then=rng.choice([TARGET, NEWEST]))


@pytest.mark.parametrize("lagging", [False, True], ids=["fresh", "lagging"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_while_recovering(processes, streams, tmp_path: Path, kind: str, lagging: bool) -> None:
    bench = Bench(processes, streams[kind], tmp_path, lagging=lagging)
    rng = random.Random(f"again {kind} {lagging}")
    points = bench.points()
    for point in rng.sample(points[len(points) // 2 :], SAMPLE // 2):
        bench.reset()
        again = Point("", rng.randint(1, 60))
        for each in (point, again):
            processes.run(Unsynced(KilledAt(bench.pull, bench.local, each)))
        bench.check_next(rng.choice([TARGET, NEWEST]), f"{point}, then after {again.occurrence} steps")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_time(processes, streams, tmp_path: Path, kind: str) -> None:
    """Up to three kills on end, by the clock, with two workers. GPUSYNC_RANDOM_KILLS=200 for the long run."""
    rng = random.Random(f"any time {kind}")
    benches = []
    for lagging in (False, True):
        (root := tmp_path / f"lagging {lagging}").mkdir()
        benches.append(Bench(processes, streams[kind], root, lagging=lagging))
    seconds = [bench.usual_seconds(workers=2) for bench in benches]
    kills = 0
    while kills < RANDOM_KILLS // len(KINDS):
        bench = rng.choice(benches)
        bench.reset()
        for _ in range(rng.randint(1, 3)):
            pull = bench.stream.pull(bench.local, TARGET, workers=2)
            kills += kill_after(processes, pull, rng.uniform(0, seconds[benches.index(bench)]))
        bench.check_next(rng.choice([TARGET, NEWEST]), f"after {kills} kills")


def kill_after(processes: ForkServer, action, seconds: float) -> int:
    """1 if the process was still running."""
    pid = processes.start(action)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return int(processes.wait(pid).was_killed)
