"""The disk path against its floor: a delta is pulled into a local checkpoint, each part of that work is timed alone.

The floor is what has to happen at least, on one thread: read the base, decode, xor, digest, write the spool of new
values, write every touched page in place, make both writes durable. A full reload of the checkpoint is the rival. Pulls
run in a process of their own, whose anonymous memory is watched. Every pulled state is compared with the published one;
if one is wrong, no figure is printed. Beside xor, whose floor it is, the same states are pulled in our own encoding.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import click
from floor import PARTS, measure_floor
from harness import Report, Timing, emit, measure, run_watched
from synthetic import SIZES, Settings, write_base, write_next

from gpusync.demo.checkpoints import check_equal, time_full_reload
from gpusync.publish import CheckpointTensors, Publisher
from gpusync.stream import read_checkpoint, read_version, version_path

MAX_WALL_OVER_FLOOR = 1.3
MAX_ANONYMOUS_BYTES = 400_000_000

_CHILD = """
import json, sys, time
from gpusync import pull
options = json.loads(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
report = pull(**options)
print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "stages": report.seconds}))
"""


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="1GB", show_default=True)
@click.option("--density", default=0.01, show_default=True, help="Share of elements that a version changes.")
@click.option("--encoding", type=click.Choice(["xor", "overwrite", "gpusync"]), default="xor", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Measured pulls, each of a version of its own.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    size: str, density: float, encoding: str, repeats: int, work_dir: Path | None, as_json: bool, as_csv: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-pull-", dir=work_dir) as temporary:
        settings = Settings(nbytes=SIZES[size], density=density)
        ours: list[Pull] = []
        if encoding == "xor":
            beside = Stream(work=Path(temporary) / "gpusync", settings=settings, encoding="gpusync")
            ours = beside.run(repeats)
            shutil.rmtree(beside.work)
        stream = Stream(work=Path(temporary), settings=settings, encoding=encoding)
        pulls = stream.run(repeats)
        reload = measure(lambda: time_full_reload(stream.local_dir), repeats=repeats)
        # Last, because it writes into the local files behind the mirror's back.
        floor = stream.measure_floor(repeats) if encoding == "xor" else {}
        emit([_report(stream, pulls, ours, floor, reload)], directory=stream.work, as_json=as_json, as_csv=as_csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    wall_s: float
    cpu_s: float
    anonymous_bytes: int


@dataclass(slots=True, kw_only=True)
class Stream:
    """A trainer's side, a stream and a local checkpoint under `work`. `version` is the newest published one."""

    work: Path
    settings: Settings
    encoding: str
    version: int = 0
    elements: int = 0
    elements_changed: int = 0
    publisher: Publisher = field(init=False)

    @property
    def source_dir(self) -> Path:
        return self.work / "stream"

    @property
    def local_dir(self) -> Path:
        return self.work / "local"

    def state_dir(self, version: int) -> Path:
        return self.work / f"state_{version}"

    def run(self, repeats: int) -> list[Pull]:
        """The first pull warms the page cache, and reads the mirror's files for the first time; it does not count."""
        self.start()
        self.sync()
        return [self.sync() for _ in range(repeats)]

    def start(self) -> None:
        self.elements = write_base(self.state_dir(0), self.settings)
        self.publisher = Publisher(self.source_dir, base_dir=self.state_dir(0), encoding=self.encoding)
        self._pull()

    def sync(self) -> Pull:
        """Publish one more version, pull it, compare; only the pull is measured."""
        before, self.version = self.state_dir(self.version), self.version + 1
        after = self.state_dir(self.version)
        self.elements_changed = write_next(before, after, self.settings, step=self.version)
        self.publisher.publish(CheckpointTensors(after), version=self.version)
        if self.version >= 3:  # version 0 is the pull's base directory, the one before the newest the floor's
            shutil.rmtree(self.state_dir(self.version - 2))
        os.sync()
        pulled = self._pull()
        check_equal(self.local_dir, after)
        return pulled

    def measure_floor(self, repeats: int) -> dict[str, Timing]:
        base = read_checkpoint(self.state_dir(self.version - 1))
        version = read_version(self.source_dir, self.version)
        floor = measure_floor(base, version, local_dir=self.local_dir, repeats=repeats)
        check_equal(self.local_dir, self.state_dir(self.version))
        return floor

    def _pull(self) -> Pull:
        options = {
            "local_checkpoint_dir": str(self.local_dir),
            "base_dir": str(self.state_dir(0)),
            "source_dir": str(self.source_dir),
            "target_version": self.version,
        }
        printed, anonymous_bytes = run_watched([sys.executable, "-c", _CHILD, json.dumps(options)])
        told = json.loads(printed)
        return Pull(wall_s=told["wall_s"], cpu_s=told["cpu_s"], anonymous_bytes=anonymous_bytes)


def _report(stream: Stream, pulls: list[Pull], ours: list[Pull], floor: dict[str, Timing], reload: Timing) -> Report:
    nbytes = 2 * stream.elements
    wall_s = statistics.median(pull.wall_s for pull in pulls)
    anonymous_bytes = max(pull.anonymous_bytes for pull in pulls)
    wire_bytes = sum(file.stat().st_size for file in version_path(stream.source_dir, stream.version).iterdir())
    rows = [_row(part, floor[part].wall_s, floor[part].cpu_s, nbytes) for part in PARTS if part in floor]
    notes = [
        f"{stream.elements_changed / stream.elements:.2%} of the elements changed; the version is {wire_bytes:,} bytes,"
        f" {wire_bytes / nbytes:.2%} of the checkpoint's {nbytes:,}",
        f"anonymous memory of the pulling process: {anonymous_bytes / 1e6:.0f} MB at most "
        + _judged(anonymous_bytes, MAX_ANONYMOUS_BYTES, f"at most {MAX_ANONYMOUS_BYTES // 10**6} MB", stream),
        "every pulled state was equal to the published one, bit for bit",
    ]
    if floor:
        floor_s = sum(timing.wall_s for timing in floor.values())
        rows.append(_row("floor: the sum", floor_s, sum(timing.cpu_s for timing in floor.values()), nbytes))
        notes = [_over_floor("pull", wall_s / floor_s, stream), *notes]
        if ours:
            ratio = statistics.median(pull.wall_s for pull in ours) / floor_s
            notes.insert(1, _over_floor("pull, gpusync,", ratio, stream))
    rows += [
        _pull_row("pull", pulls, nbytes),
        *([_pull_row("pull, gpusync", ours, nbytes)] if ours else []),
        _row("rival: full reload with safetensors", reload.wall_s, reload.cpu_s, nbytes),
    ]
    return Report(
        title=f"{stream.encoding} delta of {stream.settings.density:.2%}, median of {len(pulls)}",
        columns=("part", "wall s", "CPU s", "GB/s", "anonymous MB"),
        rows=rows,
        notes=notes,
    )


def _pull_row(part: str, pulls: list[Pull], nbytes: int) -> dict[str, object]:
    wall_s, cpu_s = (statistics.median(times) for times in zip(*((p.wall_s, p.cpu_s) for p in pulls), strict=True))
    anonymous_bytes = max(pull.anonymous_bytes for pull in pulls)
    return _row(part, wall_s, cpu_s, nbytes) | {"anonymous MB": anonymous_bytes // 10**6}


def _over_floor(what: str, ratio: float, stream: Stream) -> str:
    judged = _judged(ratio, MAX_WALL_OVER_FLOOR, f"at most {MAX_WALL_OVER_FLOOR}", stream)
    return f"{what} over floor: {ratio:.2f} {judged}"


def _row(part: str, wall_s: float, cpu_s: float, nbytes: int) -> dict[str, object]:
    return {"part": part, "wall s": wall_s, "CPU s": cpu_s, "GB/s": nbytes / wall_s / 1e9 if wall_s else None}


def _judged(found: float, limit: float, target: str, stream: Stream) -> str:
    if stream.settings.nbytes < SIZES["1GB"]:
        return f"(target from 1 GB on: {target})"
    return f"(target: {target}; {'met' if found <= limit else 'MISSED'})"


if __name__ == "__main__":
    main()
