"""The mirror written behind: how long until a version is durable, and what folding several at once costs.

A version is durable once `Mirror.accept` has returned. In turn with it, on the same disk: a plain write and fsync of
the very bytes that were received, from memory, and that of a full checkpoint, which is what a host without deltas would
write. Folds are timed from the moment they may begin until the tensor files hold the newest of 1, 2, 4 and
8 pending versions. Every sample starts from a local checkpoint at version 0; every folded state is compared with the
published one, and if one is wrong, no figure is printed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from harness import Report, emit
from synthetic import SIZES, Settings, write_base, write_next

from gpusync import Mirror, Publisher, pull
from gpusync.demo.checkpoints import check_equal
from gpusync.publish import CheckpointTensors
from gpusync.stream import version_path

COALESCED = (1, 2, 4, 8)
# Densities of the streams that make deltas of several sizes; all but the last make one version.
DENSITIES = (0.002, 0.02, 0.05, 0.01)
# How often a version is received for one sample: all but the last time it is discarded.
RECEIVED = 3
MAX_OVER_PLAIN = 3.0
FROM_BYTES = 16_000_000
MAX_FOLD_GROWTH = 5.0
FLUSH_TIMEOUT_S = 600.0
WRITE_BYTES = 4 << 20


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="1GB", show_default=True)
@click.option("--encoding", type=click.Choice(["xor", "overwrite", "gpusync"]), default="xor", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Samples of each kind, the kinds taken in turn.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(size: str, encoding: str, repeats: int, work_dir: Path | None, as_json: bool, as_csv: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-mirror-", dir=work_dir) as temporary:
        work = Path(temporary)
        elements = write_base(work / "base", Settings(nbytes=SIZES[size]))
        streams = [Stream(work=work, nbytes=SIZES[size], density=density) for density in DENSITIES]
        for stream in streams:
            stream.publish(encoding, versions=max(COALESCED) if stream is streams[-1] else 1)
        kinds = [(stream, count) for stream in streams for count in stream.counts]
        samples: dict[tuple[float, int], list[Sample]] = {(stream.density, count): [] for stream, count in kinds}
        for _ in range(repeats):
            for stream, count in kinds:
                samples[stream.density, count].append(take_sample(stream, count))
        full_s = [time_full_write(work) for _ in range(repeats)]
        reports = [
            _durable_report(samples, full_s, nbytes=2 * elements),
            _fold_report({count: samples[DENSITIES[-1], count] for count in COALESCED}, encoding, nbytes=2 * elements),
        ]
        emit(reports, directory=work, as_json=as_json, as_csv=as_csv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Versions that each change `density` of the elements; `counts` are those whose states are kept to compare with."""

    work: Path
    nbytes: int
    density: float
    counts: list[int] = field(default_factory=list)

    @property
    def source_dir(self) -> Path:
        return self.work / f"stream_{self.density}"

    @property
    def local_dir(self) -> Path:
        return self.work / "local"

    def state_dir(self, version: int) -> Path:
        return self.work / f"state_{self.density}_{version}" if version else self.work / "base"

    def publish(self, encoding: str, *, versions: int) -> None:
        settings = Settings(nbytes=self.nbytes, density=self.density)
        publisher = Publisher(self.source_dir, base_dir=self.work / "base", encoding=encoding)
        for version in range(1, versions + 1):
            write_next(self.state_dir(version - 1), self.state_dir(version), settings, step=version)
            with CheckpointTensors(self.state_dir(version)) as tensors:
                publisher.publish(tensors)
        self.counts.extend(count for count in COALESCED if count <= versions)

    def files(self, count: int) -> Iterator[Path]:
        for version in range(1, count + 1):
            yield from sorted(version_path(self.source_dir, version).iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One arrival of `wire_bytes`: until they were durable, the plain write of them, and until they were folded."""

    wire_bytes: int
    durable_s: float
    plain_s: float
    fold_s: float


def take_sample(stream: Stream, count: int) -> Sample:
    """From version 0: receive and accept `count` versions at once, then let them be folded."""
    places = {"base_dir": stream.work / "base", "source_dir": stream.source_dir}
    pull(local_checkpoint_dir=stream.local_dir, target_version=0, **places)
    data = [path.read_bytes() for path in stream.files(count)]
    with Mirror(stream.local_dir, **places) as mirror:
        mirror.hold(1)
        plain, received = [], []
        for _ in range(RECEIVED):
            mirror.discard(count)
            os.sync()
            plain.append(time_plain_write(stream.work / "plain", data))
            os.sync()
            began = time.perf_counter()
            mirror.receive(count)
            received.append(time.perf_counter() - began)
        began = time.perf_counter()
        mirror.accept(count)
        durable_s = statistics.median(received) + time.perf_counter() - began
        os.sync()
        began = time.perf_counter()
        mirror.release(1)
        mirror.flush(FLUSH_TIMEOUT_S)
        fold_s = time.perf_counter() - began
    check_equal(stream.local_dir, stream.state_dir(count))
    return Sample(wire_bytes=sum(map(len, data)), durable_s=durable_s, plain_s=statistics.median(plain), fold_s=fold_s)


def time_plain_write(path: Path, data: Sequence[bytes]) -> float:
    """Seconds to write `data` to one new file, piece by piece, and to make it durable with its name."""
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for each in data:
            for offset in range(0, len(each), WRITE_BYTES):
                file.write(memoryview(each)[offset : offset + WRITE_BYTES])
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    spent = time.perf_counter() - began
    os.close(directory)
    path.unlink()
    return spent


def time_full_write(work: Path) -> float:
    """Seconds for all bytes of the base checkpoint, which lie in the page cache."""
    spent = 0.0
    for path in sorted((work / "base").glob("*.safetensors")):
        data = path.read_bytes()
        spent += time_plain_write(work / "plain", [data])
    return spent


def _durable_report(samples: dict[tuple[float, int], list[Sample]], full_s: list[float], *, nbytes: int) -> Report:
    rows: list[dict[str, object]] = []
    notes = []
    for (density, count), taken in sorted(samples.items(), key=lambda item: item[1][0].wire_bytes):
        wire_bytes = taken[0].wire_bytes
        durable_s, plain_s = (statistics.median(getattr(s, name) for s in taken) for name in ("durable_s", "plain_s"))
        ratio = durable_s / plain_s
        what = f"{density:.1%} x {count}"
        rows.append(
            {
                "changed x versions": what,
                "MB": wire_bytes / 1e6,
                "durable s": durable_s,
                "plain write s": plain_s,
                "over plain": ratio,
                "of full": durable_s / statistics.median(full_s),
            }
        )
        if wire_bytes >= FROM_BYTES * count:
            notes.append(f"{what}: {ratio:.2f} times the plain write {_judged(ratio, MAX_OVER_PLAIN)}")
    full = statistics.median(full_s)
    rows.append({"changed x versions": "rival: all in full", "MB": nbytes / 1e6, "plain write s": full})
    if not notes:
        notes.append(f"target from {FROM_BYTES // 10**6} MB on: at most {MAX_OVER_PLAIN:g} times the plain write")
    return Report(
        title=f"time until durable, median of {len(full_s)}",
        columns=("changed x versions", "MB", "durable s", "plain write s", "over plain", "of full"),
        rows=rows,
        notes=notes,
    )


def _fold_report(samples: dict[int, list[Sample]], encoding: str, *, nbytes: int) -> Report:
    folds = {count: statistics.median(sample.fold_s for sample in taken) for count, taken in samples.items()}
    rows: list[dict[str, object]] = [
        {
            "versions in one fold": count,
            "wall s": fold_s,
            "GB/s": nbytes / fold_s / 1e9,
            "over one": fold_s / folds[1],
            "of as many folds": fold_s / (count * folds[1]),
        }
        for count, fold_s in folds.items()
    ]
    growth = folds[max(folds)] / folds[1]
    judged = f"(target for xor: at most {MAX_FOLD_GROWTH:g})"
    if encoding == "xor":
        judged = _judged(growth, MAX_FOLD_GROWTH) if nbytes > SIZES["toy"] else "(toy size: no target)"
    return Report(
        title=f"{encoding} folds of {DENSITIES[-1]:.1%} versions into {nbytes / 1e6:,.0f} MB",
        columns=("versions in one fold", "wall s", "GB/s", "over one", "of as many folds"),
        rows=rows,
        notes=[
            f"{max(folds)} versions in one fold: {growth:.2f} times one {judged}",
            "every folded state was equal to the published one, bit for bit",
        ],
    )


def _judged(found: float, limit: float) -> str:
    return f"(target: at most {limit:g}; {'met' if found <= limit else 'MISSED'})"


if __name__ == "__main__":
    main()
