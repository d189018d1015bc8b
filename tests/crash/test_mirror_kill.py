"""SIGKILL at every step of a mirror that is written behind: what was accepted is never lost, though the stream may be.

Each version is received, accepted and folded before the next, so that every run passes much the same points; the fold
is the mirror's own thread's.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpusync
from support.fork_server import ForkServer
from support.kill import KilledAt, Point, PointsOf, Unsynced
from support.streams import Stream, check_local, few_tensors, write_stream

KINDS = ["xor", "overwrite", "full", "gpusync"]
NEWEST = 5
SAMPLE = 12
WAIT_S = 60.0


@dataclass(frozen=True)
class Behind:
    """Bring a mirror to each of `targets`. What `accept` has returned for is noted in `reported`."""

    local: Path
    base: Path
    source: Path
    reported: Path
    targets: tuple[int, ...]

    def __call__(self) -> None:
        with self.open() as mirror:
            for target in self.targets:
                mirror.receive(target)
                mirror.accept(target)
                # in one step: the fold has begun, and with it the end may come at any moment
                note = self.reported.with_suffix(".new")
                note.write_text(str(target))
                note.rename(self.reported)
                mirror.flush(WAIT_S)

    def open(self) -> gpusync.Mirror:
        return gpusync.Mirror(
            self.local, base_dir=self.base, source_dir=self.source, workers=1, lock_timeout=30.0, keep_versions=1
        )


@dataclass(frozen=True)
class ComeBack:
    """Open the mirror again and let it fold; what is durable then."""

    behind: Behind

    def __call__(self) -> int | None:
        with self.behind.open() as mirror:
            durable = mirror.status().durable_version
            mirror.flush(WAIT_S)
            assert mirror.status().durable_version == durable
            return durable


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    return {kind: write_stream(tmp_path_factory.mktemp(kind), kind, few_tensors(), count=NEWEST) for kind in KINDS}


class Bench:
    def __init__(self, processes: ForkServer, stream: Stream, root: Path) -> None:
        self.processes, self.stream = processes, stream
        self.behind = Behind(root / "local", stream.base, stream.source, root / "reported", (1, 4))

    def reset(self) -> None:
        shutil.rmtree(self.behind.local, ignore_errors=True)
        self.behind.reported.unlink(missing_ok=True)

    def points(self) -> list[Point]:
        self.reset()
        done = self.processes.run(Unsynced(PointsOf(self.behind, self.behind.local)))
        assert done.error is None, done.error
        return done.value

    def try_point(self, point: Point) -> None:
        self.reset()
        self.processes.run(Unsynced(KilledAt(self.behind, self.behind.local, point)))
        reported = int(self.behind.reported.read_text()) if self.behind.reported.exists() else None
        hidden = self.stream.source.with_name("hidden")
        self.stream.source.rename(hidden)
        try:
            again = self.processes.run(Unsynced(ComeBack(self.behind)))
        finally:
            hidden.rename(self.stream.source)
        assert again.error is None, f"{point}: {again.error}"
        if reported is not None:
            assert again.value is not None, f"{point}: version {reported} is lost"
            assert again.value >= reported, f"{point}: version {reported} is lost"
        if again.value is not None:
            check_local(self.behind.local, self.stream, again.value, point)
        after = self.processes.run(Unsynced(self.stream.pull(self.behind.local, NEWEST)))
        assert after.error is None, f"{point}: {after.error}"
        check_local(self.behind.local, self.stream, NEWEST, point)


def test_killed_at_every_third_step(processes: ForkServer, streams: dict[str, Stream], tmp_path: Path) -> None:
    bench = Bench(processes, streams["xor"], tmp_path)
    points = bench.points()
    assert len({point.name for point in points}) >= 30
    for point in points[::3]:
        bench.try_point(point)


@pytest.mark.parametrize("kind", ["overwrite", "full", "gpusync"])
def test_killed_at_some_steps(processes: ForkServer, streams: dict[str, Stream], tmp_path: Path, kind: str) -> None:
    bench = Bench(processes, streams[kind], tmp_path)
    for point in random.Random(kind).sample(bench.points(), SAMPLE):
        bench.try_point(point)
