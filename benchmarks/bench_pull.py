"""The disk path against its floor: a delta is pulled into a local checkpoint, each part of that work is timed alone.

The floor is what has to happen at least, on one thread: read the base, decode, xor, digest, write the spool of new
values, write every touched page in place, make both writes durable. A full reload of the checkpoint is the rival. Pulls
run in a process of their own, whose anonymous memory is watched. Every pulled state is compared with the published one;
if one is wrong, no figure is printed. Beside xor, whose floor it is, the same states are pulled in our own encoding,
version by version.
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
from gpusync_kernels.host import host_ops
options = json.loads(sys.argv[1])
start = time.perf_counter()
loops = host_ops().name
wall, cpu = time.perf_counter(), time.process_time()
pull(**options)
ended, used = time.perf_counter(), time.process_time()
print(json.dumps({"loops": loops, "loops_s": wall - start, "wall_s": ended - wall, "cpu_s": used - cpu}))
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
        states = States(work=Path(temporary), settings=Settings(nbytes=SIZES[size], density=density))
        encodings = ["xor", "gpusync"] if encoding == "xor" else [encoding]
        streams = [Stream(states=states, work=Path(temporary) / name, encoding=name) for name in encodings]
        # The first pulls warm the page cache, and read the mirror's files for the first time; they do not count.
        _, *pulls = [_sync(states, streams) for _ in range(repeats + 1)]
        stream, *others = streams
        taken, *ours = [list(each) for each in zip(*pulls, strict=True)]
        reload = measure(lambda: time_full_reload(stream.local_dir), repeats=repeats)
        # Last, because it writes into the local files behind the mirror's back.
        floor = stream.measure_floor(repeats) if others else {}
        report = _report(stream, taken, ours[0] if ours else [], floor, reload)
        emit([report], directory=states.work, as_json=as_json, as_csv=as_csv)


def _sync(states: States, streams: list[Stream]) -> list[Pull]:
    """One more version: published and pulled in each encoding, one after the other, each first at every other one."""
    states.advance()
    order = streams if states.version % 2 else streams[::-1]
    pulls = {stream.encoding: stream.sync() for stream in order}
    states.forget()
    return [pulls[stream.encoding] for stream in streams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Without the `loops_s` that a process takes once to load its `loops`."""

    loops: str
    loops_s: float
    wall_s: float
    cpu_s: float
    anonymous_bytes: int


@dataclass(slots=True, kw_only=True)
class States:
    """A trainer's side: its state after each version. `version` is the newest."""

    work: Path
    settings: Settings
    version: int = 0
    elements: int = field(init=False)
    elements_changed: int = 0

    def __post_init__(self) -> None:
        self.elements = write_base(self.directory(0), self.settings)

    def directory(self, version: int) -> Path:
        return self.work / f"state_{version}"

    def advance(self) -> None:
        self.version += 1
        before, after = self.directory(self.version - 1), self.directory(self.version)
        self.elements_changed = write_next(before, after, self.settings, step=self.version)

    def forget(self) -> None:
        """Version 0 is the pulls' base directory, the one before the newest the floor's."""
        if self.version >= 3:
            shutil.rmtree(self.directory(self.version - 2))


@dataclass(slots=True, kw_only=True)
class Stream:
    """The states published in one encoding, and a local checkpoint that follows, under `work`."""

    states: States
    work: Path
    encoding: str
    publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        base_dir = self.states.directory(0)
        self.publisher = Publisher(self.source_dir, base_dir=base_dir, encoding=self.encoding)
        self._pull(0)

    @property
    def source_dir(self) -> Path:
        return self.work / "stream"

    @property
    def local_dir(self) -> Path:
        return self.work / "local"

    def sync(self) -> Pull:
        """Publish the newest state, pull it, compare; only the pull is measured."""
        version = self.states.version
        after = self.states.directory(version)
        self.publisher.publish(CheckpointTensors(after), version=version)
        os.sync()
        pulled = self._pull(version)
        check_equal(self.local_dir, after)
        return pulled

    def measure_floor(self, repeats: int) -> dict[str, Timing]:
        newest = self.states.version
        base = read_checkpoint(self.states.directory(newest - 1))
        version = read_version(self.source_dir, newest)
        floor = measure_floor(base, version, local_dir=self.local_dir, repeats=repeats)
        check_equal(self.local_dir, self.states.directory(newest))
        return floor

    def _pull(self, version: int) -> Pull:
        options = {
            "local_checkpoint_dir": str(self.local_dir),
            "base_dir": str(self.states.directory(0)),
            "source_dir": str(self.source_dir),
            "target_version": version,
        }
        printed, anonymous_bytes = run_watched([sys.executable, "-c", _CHILD, json.dumps(options)])
        return Pull(**json.loads(printed), anonymous_bytes=anonymous_bytes)


def _report(stream: Stream, pulls: list[Pull], ours: list[Pull], floor: dict[str, Timing], reload: Timing) -> Report:
    states = stream.states
    nbytes = 2 * states.elements
    wall_s = statistics.median(pull.wall_s for pull in pulls)
    anonymous_bytes = max(pull.anonymous_bytes for pull in pulls)
    wire_bytes = sum(file.stat().st_size for file in version_path(stream.source_dir, states.version).iterdir())
    rows = [_row(part, floor[part].wall_s, floor[part].cpu_s, nbytes) for part in PARTS if part in floor]
    notes = [
        f"{states.elements_changed / states.elements:.2%} of the elements changed; the version is {wire_bytes:,} bytes,"
        f" {wire_bytes / nbytes:.2%} of the checkpoint's {nbytes:,}",
        f"anonymous memory of the pulling process: {anonymous_bytes / 1e6:.0f} MB at most "
        + _judged(anonymous_bytes, MAX_ANONYMOUS_BYTES, f"at most {MAX_ANONYMOUS_BYTES // 10**6} MB", stream),
        f"loops: {pulls[0].loops}; loading them, once in a process, took {pulls[-1].loops_s:.2f} s and is not counted",
        "every pulled state was equal to the published one, bit for bit",
    ]
    if floor:
        floor_s = sum(timing.wall_s for timing in floor.values())
        rows.append(_row("floor: the sum", floor_s, sum(timing.cpu_s for timing in floor.values()), nbytes))
        notes = [_over_floor("pull", wall_s / floor_s, stream), *notes]
        if ours:
            ratio = statistics.median(pull.wall_s for pull in ours) / floor_s
            notes.insert(1, _over_floor("pull, gpusync,", ratio, stream))
            paired = statistics.median(each.wall_s / other.wall_s for each, other in zip(ours, pulls, strict=True))
            notes.insert(2, f"pull, gpusync, over pull, version by version: {paired:.2f} (target: below 1)")
    rows += [
        _pull_row("pull", pulls, nbytes),
        *([_pull_row("pull, gpusync", ours, nbytes)] if ours else []),
        _row("rival: full reload with safetensors", reload.wall_s, reload.cpu_s, nbytes),
    ]
    return Report(
        title=f"{stream.encoding} delta of {states.settings.density:.2%}, median of {len(pulls)}",
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
    if stream.states.settings.nbytes < SIZES["1GB"]:
        return f"(target from 1 GB on: {target})"
    return f"(target: {target}; {'met' if found <= limit else 'MISSED'})"


if __name__ == "__main__":
    main()
