"""One command for a machine with a GPU: is everything exact there, and how fast beside a plain device copy?

Prints the machine, runs the tests that need a device (`pytest -m gpu`), then times every device operation on large
buffers, each result compared with the reference or the library's digest, nvCOMP on frames of several sizes, and the
commit and prepare of a synthetic rank of 20 GB. Ends in three tables, with what was predicted beside what was found,
and a line for everything that did not run. Takes less than five minutes on one GPU.

Exit status: 0 all exact (a missed target is told in the table); 1 a wrong byte, or a test that failed or did not run;
2 no CUDA device, or wrong usage.

    python benchmarks/gpu_check.py             on a GPU
    python benchmarks/gpu_check.py --dry-run   anywhere: the same script at toy size on the host's references
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench_frames import frames_report
from bench_kernels import COPY_BYTES_PER_S, FIGURES, Operands, best_time, cases, choose_device
from bench_rank import CHAIN_S_PER_BYTE, TOY_BYTES, rank_report
from bench_rank import RANK_BYTES as SYNTHETIC_BYTES
from harness import Report, machine, print_machine, print_report
from rich.console import Console

from gpusync.digest import Shards, digest_of, sharded_digests
from gpusync_kernels import Planes, SegmentTable, apply_step_planes, bind_planes, revert_step_planes

ROOT = Path(__file__).resolve().parents[1]
PREDICTIONS = ROOT / "kernels" / "README.md"

ALL_EXACT, NOT_EXACT, NO_DEVICE = 0, 1, 2

# Share of a plain device copy's bandwidth. Sparse changes count the 32-byte sectors that they touch.
TARGETS = {"xor": 0.8, "block sums": 0.8, "xor + block sums": 0.8, "sparse, 1 % of elements": 0.5}
# Operations that kernels/README.md calls otherwise.
CALLED = {"overwrite, 1 % of words": "overwrite", "sparse, 1 % of elements": "sparse apply, revert"}
RANK_BYTES = 60e9  # what predictions are for
TENSORS = 1024  # in the digest of many

TESTS_TIMEOUT_S = 200
NEEDS_ITSELF = "tests/kernels/device/test_bandwidth.py"  # times what this script times
REPETITIONS = 5
FRAMES_MIB = 512
WINDOW_ELEMENTS = 1 << 24  # compared at a time

Case = tuple[str, Callable[[], object], Callable[[], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCounts:
    """What a run of the device tests came to. `passed` of none is no proof of anything."""

    __test__ = False

    passed: int
    failed: int
    skipped: int
    output: str
    reasons: Sequence[str] = ()

    @property
    def fine(self) -> bool:
        return self.failed == 0 and self.passed > 0


@click.command(help=__doc__)
@click.option("--mib", default=1024, show_default=True, help="MiB of tensor per operation.")
@click.option("--rank-gb", default=SYNTHETIC_BYTES / 1e9, show_default=True, help="GB of the synthetic rank; 0: none.")
@click.option("--dry-run", is_flag=True, help="Toy size on the host's references: does the script run at all.")
@click.option("--without-tests", is_flag=True, help="Only time and verify the operations.")
def main(mib: int, rank_gb: float, dry_run: bool, without_tests: bool) -> None:
    out = Console(width=None if sys.stdout.isatty() else 110)
    device, reason = choose_device()
    print_machine(machine(ROOT) | {"GPU": "none" if device is None else describe(device)}, out)
    if dry_run:
        device, mib = None, 1
    elif device is None:
        out.print(f"{reason}: nothing was checked. --dry-run runs this script at toy size on the host.")
        sys.exit(NO_DEVICE)
    if without_tests:
        counts = None
    else:
        out.print("running the tests that need a device ...")
        counts = run_tests(dry_run=dry_run)
    out.print(f"timing and verifying every operation on {mib} MiB ...")
    rows = check_operations(Operands(mib << 20, device), repetitions=1 if dry_run else REPETITIONS)
    reports = [frames_report(device, mib=FRAMES_MIB, toy=dry_run)]
    if rank_gb:
        nbytes = TOY_BYTES if dry_run else int(rank_gb * 1e9)
        out.print(f"preparing and committing a synthetic rank of {nbytes / 1e6:,.0f} MB ...")
        reports.append(rank_report(device, nbytes=nbytes, toy=dry_run))
    exact = all(row["result"] == "exact" for row in rows + [row for report in reports for row in report.rows])
    if counts is not None and not (counts.fine or dry_run):
        out.print(counts.output, markup=False, highlight=False, soft_wrap=True)
    for report in reports:
        print_report(report, out)
    print_report(as_report(rows, counts, mib=mib, dry_run=dry_run), out)
    tests_fine = counts is None or counts.fine or (dry_run and counts.failed == 0)
    sys.exit(ALL_EXACT if exact and tests_fine else NOT_EXACT)


def describe(device: Any) -> str:
    import torch

    facts = torch.cuda.get_device_properties(device)
    return (
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB, "
        f"{facts.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    )


def run_tests(*, dry_run: bool) -> TestCounts:
    """The tests marked `gpu`, in a process of their own; without a device, those of one file, which skip themselves."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}", f"--deselect={NEEDS_ITSELF}"]
        command += ["tests/digest/test_device.py"] if dry_run else []
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TESTS_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return TestCounts(passed=0, failed=1, skipped=0, output=f"tests took more than {TESTS_TIMEOUT_S} s")
        return read_counts(report, done.stdout + done.stderr, failed=done.returncode != 0)


def read_counts(report: Path, output: str, *, failed: bool) -> TestCounts:
    """`failed`: what the run itself said. It counts as one where no test did, and where there is no report."""
    suite = tree.parse(report).getroot().find("testsuite") if report.exists() else None
    if suite is None:
        return TestCounts(passed=0, failed=1, skipped=0, output=output)
    tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    wrong = max(failures + errors, int(failed))
    return TestCounts(
        passed=tests - failures - errors - skipped,
        failed=wrong,
        skipped=skipped,
        output=output,
        reasons=sorted({str(each.get("message")) for each in suite.iter("skipped")}),
    )


def check_operations(operands: Operands, *, repetitions: int) -> list[dict[str, object]]:
    """A row per operation. One whose result is wrong has no time, and those after it start from a clean buffer."""
    predictions = read_predictions(PREDICTIONS.read_text() if PREDICTIONS.exists() else "")
    rows: list[dict[str, object]] = []
    plain: float | None = None
    for operation, run, verify in cases_of(operands):
        seconds = best_time(run, operands.device, repetitions)
        try:
            verify()
        except AssertionError as error:
            operands.dst[...] = 0
            rows.append({"operation": operation, "result": f"WRONG: {error}".rstrip(": ")})
            continue
        bandwidth = operands.nbytes * bytes_moved(operation) / seconds
        plain = bandwidth if plain is None else plain
        target = TARGETS.get(operation)
        rows.append(
            {
                "operation": operation,
                "GB/s": bandwidth / 1e9,
                "% of copy": 100 * bandwidth / plain,
                "target": None if target is None else f"{target:.0%}",
                "met": None if target is None else bandwidth >= target * plain,
                "ms, 60 GB": seconds * RANK_BYTES / operands.nbytes * 1e3,
                "predicted": predictions.get(CALLED.get(operation, operation).lower())
                or predicted_digest(operation, operands.nbytes),
                "result": "exact",
            }
        )
    return rows


def cases_of(operands: Operands) -> Iterator[Case]:
    """Every operation as `bench_kernels` runs it, step planes, and whole digests: the chain, and what the host does."""
    yield from cases(operands)
    yield step_planes_case(operands)
    yield digest_case("digest of one tensor", operands, [operands.nbytes])
    sizes = [operands.nbytes // TENSORS] * TENSORS
    yield digest_case(f"digests of {TENSORS:,} tensors", operands, sizes)


def step_planes_case(operands: Operands) -> Case:
    """Steps of two-byte integers, applied and reverted in turn: after an odd number of runs, each is there once."""
    planes = Planes(data=operands.src, element_bytes=2, order=0)
    bound = bind_planes(operands.table, dst=[operands.dst], planes=[planes])
    elements, runs = operands.nbytes // 2, 0

    def run() -> None:
        nonlocal runs
        (revert_step_planes if runs % 2 else apply_step_planes)(bound)
        runs += 1

    def verify() -> None:
        if runs % 2 == 0:
            run()
        found = operands.dst if operands.device is None else operands.dst.cpu().numpy()
        for start in range(0, elements, WINDOW_ELEMENTS):
            window = slice(start, min(start + WINDOW_ELEMENTS, elements))
            low, high = (operands.bytes[plane * elements :][window].astype(np.uint16) for plane in (0, 1))
            coded = low | high << np.uint16(8)
            steps = (coded >> np.uint16(1)) ^ (~(coded & np.uint16(1)) + np.uint16(1))
            assert np.array_equal(found.view("<u2")[window], steps), f"elements from {start} on differ"
        operands.dst[...] = 0

    return "step planes", run, verify


def digest_case(operation: str, operands: Operands, sizes: Sequence[int]) -> Case:
    """XXH3-128 of tensors that lie one after another in the source, against the library on the host."""
    stops = np.cumsum(sizes).tolist()
    shards = Shards(
        names=tuple(map(str, range(len(sizes)))),
        algorithms=("xxh3-128",) * len(sizes),
        nbytes=np.array(sizes, np.int64),
        table=SegmentTable.flat(
            dst_offset=[0, *stops[:-1]], src=np.arange(len(sizes)), src_offset=0, nbytes=np.array(sizes)
        ),
        buffers=(operands.src,),
    )
    found: list[tuple[str, ...]] = []

    def verify() -> None:
        parts = zip([0, *stops], stops, strict=False)
        expected = tuple(digest_of("xxh3-128", operands.bytes[start:stop]) for start, stop in parts)
        assert all(digests == expected for digests in found), "a digest differs from the library's"

    return operation, lambda: found.append(sharded_digests(shards, None).digests), verify


def predicted_digest(operation: str, nbytes: int) -> float | None:
    """In the table's unit: the bytes of block sums, and the chain of the longest tensor."""
    if not operation.startswith("digest"):
        return None
    longest = nbytes if operation == "digest of one tensor" else nbytes // TENSORS
    seconds = nbytes * 17 / 16 / COPY_BYTES_PER_S + longest * CHAIN_S_PER_BYTE
    return seconds * RANK_BYTES / nbytes * 1e3


def bytes_moved(operation: str) -> float:
    """Bytes read and written per byte of tensor."""
    if operation.startswith("digest"):
        return 1.0
    figure = FIGURES.get(operation, FIGURES["copy"])
    return float(figure.read + figure.written)


def read_predictions(text: str) -> dict[str, float]:
    """Milliseconds for a rank of 60 GB by operation, from the table of `kernels/README.md` that has both columns.

    `| operation | ... | predicted H200, ms |`; names in lowercase.
    """
    found: dict[str, float] = {}
    name_column = value_column = None
    for line in text.splitlines():
        cells = [cell.strip(" `*").lower() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            name_column = value_column = None
        elif name_column is None or value_column is None:
            name_column = next((i for i, cell in enumerate(cells) if cell.startswith(("operation", "op"))), None)
            value_column = next((i for i, cell in enumerate(cells) if cell.startswith("predicted")), None)
        elif len(cells) > max(name_column, value_column):
            number = re.match(r"[~≈]?\s*(\d+(?:\.\d+)?)", cells[value_column])
            if number:
                found[cells[name_column]] = float(number[1])
    return found


def as_report(rows: Sequence[dict[str, object]], counts: TestCounts | None, *, mib: int, dry_run: bool) -> Report:
    where = "the host's references, dry run: times mean nothing" if dry_run else "the device"
    wrong = [str(row["operation"]) for row in rows if row["result"] != "exact"]
    missed = [str(row["operation"]) for row in rows if row.get("met") is False and not dry_run]
    notes = []
    if counts is not None:
        told = f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped"
        notes.append(f"tests that need a device: {told}")
        notes += [f"skipped: {reason}" for reason in counts.reasons]
    else:
        notes.append("the tests that need a device were not run")
    if not any(row.get("predicted") for row in rows):
        notes.append("no predictions: kernels/README.md has no table of them")
    if missed:
        notes.append(f"below target: {', '.join(missed)}")
    notes.append(f"WRONG BYTES: {', '.join(wrong)}" if wrong else "every result was exact")
    rows = [row | {"target": f"{row['target']} MISSED"} if row["operation"] in missed else row for row in rows]
    columns = ("operation", "GB/s", "% of copy", "target", "ms, 60 GB", "predicted", "result")
    return Report(title=f"{mib} MiB per operation on {where}", columns=columns, rows=rows, notes=notes)


if __name__ == "__main__":
    main()
