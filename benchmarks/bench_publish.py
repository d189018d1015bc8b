"""How fast a trainer publishes: a delta in each encoding, with one worker thread and with more, against writing it all.

The rivals are a full version by the same publisher, and the plain way: the checkpoint written by safetensors, from
tensors that are in memory already, and synced. Two states take turns, a step apart, so that every version changes the
same share. Every published version is pulled and compared with the state; if one byte is wrong, no figure is printed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import click
from harness import Report, Timing, emit, measure, stopwatch
from safetensors.torch import load_file, save_file
from synthetic import SIZES, Settings, write_base, write_next

from gpusync import CheckpointTensors, Publisher, PublishReport, pull
from gpusync.demo.checkpoints import check_equal

ENCODINGS = ("xor", "overwrite", "gpusync")


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="1GB", show_default=True)
@click.option("--density", default=0.01, show_default=True, help="Share of elements that a version changes.")
@click.option("--encoding", "encodings", type=click.Choice(list(ENCODINGS)), multiple=True, help="All by default.")
@click.option("--workers", "workers", type=int, multiple=True, help="Threads; 1 and all cores by default.")
@click.option("--repeats", default=3, show_default=True, help="Measured versions of each, after one that warms up.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    size: str,
    density: float,
    encodings: tuple[str, ...],
    workers: tuple[int, ...],
    repeats: int,
    work_dir: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-publish-", dir=work_dir) as temporary:
        bench = Bench(work=Path(temporary), settings=Settings(nbytes=SIZES[size], density=density), repeats=repeats)
        bench.start()
        rows = [
            bench.delta_row(encoding, threads)
            for encoding in encodings or ENCODINGS
            for threads in workers or sorted({1, max(2, cores)})
        ]
        rows += [bench.full_row(max(workers or (2, cores))), bench.plain_row()]
        emit([_report(bench, rows)], directory=bench.work, as_json=as_json, as_csv=as_csv)


@dataclass(slots=True, kw_only=True)
class Bench:
    """States 0 and 1 of a model, and streams of them. `forms`: what payloads were written as, by encoding."""

    work: Path
    settings: Settings
    repeats: int
    elements: int = 0
    elements_changed: int = 0
    states: list[Path] = field(default_factory=list)
    forms: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return 2 * self.elements

    def start(self) -> None:
        self.states = [self.work / "state_0", self.work / "state_1"]
        self.elements = write_base(self.states[0], self.settings)
        self.elements_changed = write_next(self.states[0], self.states[1], self.settings, step=1)

    def delta_row(self, encoding: str, workers: int) -> dict[str, object]:
        timing, report, pull_s = self._published(encoding=encoding, workers=workers)
        self.forms[encoding] = ", ".join(f"{count} {form}" for form, count in sorted(report.forms.items()))
        return self._row(encoding, workers, timing, report.wire_bytes) | {"pull s": pull_s}

    def full_row(self, workers: int) -> dict[str, object]:
        timing, report, pull_s = self._published(workers=workers, full_every=1)
        return self._row("full version", workers, timing, report.wire_bytes) | {"pull s": pull_s}

    def plain_row(self) -> dict[str, object]:
        """The tensors of a state, from memory to disk and durable, shard by shard as the state's own files."""
        shards = {path.name: load_file(path) for path in sorted(self.states[1].glob("*.safetensors"))}
        target = self.work / "plain"

        def make_anew() -> None:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(self.states[1], target, ignore=lambda _, names: set(shards) & set(names))
            os.sync()

        def write() -> None:
            for name, tensors in shards.items():
                save_file(tensors, target / name, {"format": "pt"})
                _sync(target / name)
            _sync(target)

        timing = measure(write, repeats=self.repeats, before=make_anew)
        check_equal(target, self.states[1])
        written = sum((target / name).stat().st_size for name in shards)
        shutil.rmtree(target)
        return self._row("rival: safetensors", 1, timing, written)

    def _published(self, **options: object) -> tuple[Timing, PublishReport, float]:
        """Time versions that go to and fro between the states, then follow them all; the last: median of the pulls."""
        source_dir, reports = self.work / "stream", []
        publisher = Publisher(source_dir, base_dir=self.states[0], **options)

        def publish() -> None:
            state = self.states[(publisher.version + 1) % 2]
            reports.append(publisher.publish(CheckpointTensors(state)))

        timing = measure(publish, repeats=self.repeats, before=os.sync)
        pull_s = self._follow(source_dir, publisher.version)
        shutil.rmtree(source_dir)
        return timing, reports[-1], pull_s

    def _follow(self, source_dir: Path, newest: int) -> float:
        """Pull every version, and compare it; the median of the pulls' seconds without the first, which seeds."""
        local_dir, seconds = self.work / "local", []
        for version in range(1, newest + 1):
            os.sync()
            with stopwatch() as passed:
                pull(
                    local_checkpoint_dir=local_dir,
                    base_dir=self.states[0],
                    source_dir=source_dir,
                    target_version=version,
                )
                seconds.append(passed()[0])
            check_equal(local_dir, self.states[version % 2])
        shutil.rmtree(local_dir)
        return statistics.median(seconds[1:])

    def _row(self, what: str, workers: int, timing: Timing, wire_bytes: int) -> dict[str, object]:
        return {
            "published": what,
            "workers": workers,
            "wall s": timing.wall_s,
            "CPU s": timing.cpu_s,
            "GB/s": self.nbytes / timing.wall_s / 1e9,
            "wire MB": wire_bytes / 1e6,
            "% of model": 100 * wire_bytes / self.nbytes,
        }


def _report(bench: Bench, rows: list[dict[str, object]]) -> Report:
    plain_s = rows[-1]["wall s"]
    assert isinstance(plain_s, float)
    rows = [row | {"of plain": float(str(row["wall s"])) / plain_s} for row in rows]
    return Report(
        title=f"publishing {bench.nbytes / 1e6:,.0f} MB, median of {bench.repeats}",
        columns=("published", "workers", "wall s", "CPU s", "GB/s", "wire MB", "% of model", "of plain", "pull s"),
        rows=rows,
        notes=[
            f"{bench.elements_changed / bench.elements:.2%} of the elements change with every version; GB/s are of the "
            "model; a publish reads the state from its files, in the page cache, and is durable when it returns",
            "of plain: wall seconds over the rival's, which has its tensors in memory and compares nothing",
            "pull: the disk path's, of one such version, durable on return",
            *(f"{encoding}: {forms}" for encoding, forms in bench.forms.items()),
            "every published version was pulled, and was the state, bit for bit",
        ],
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
