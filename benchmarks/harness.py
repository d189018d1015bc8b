"""What every benchmark prints and measures alike: the machine, medians of repeated runs, one table, JSON and CSV.

Scripts in this directory are run as files (`python benchmarks/bench_pull.py`); they import each other by plain name.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from gpusync.stream import filesystem_type

NO_DEVICE = "no CUDA device: the GPU path is inactive"
_PACKAGES = ("numpy", "zstandard", "xxhash", "blake3", "safetensors", "torch", "triton", "nvidia-nvcomp-cu13")
_SAMPLE_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median wall and CPU seconds of one call; CPU counts all threads of the process."""

    wall_s: float
    cpu_s: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A table of results: `columns` are keys of each row. Texts are printed as they are, floats with four digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[dict[str, object]]
    notes: Sequence[str] = ()


def measure(
    run: Callable[[], object], *, repeats: int, warm_up: int = 1, before: Callable[[], object] | None = None
) -> Timing:
    """Call `run` `warm_up` times unmeasured and `repeats` times measured; `before` runs ahead of each, unmeasured."""
    walls, cpus = [], []
    for number in range(warm_up + repeats):
        if before is not None:
            before()
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if number >= warm_up:
            walls.append(wall)
            cpus.append(cpu)
    return Timing(wall_s=statistics.median(walls), cpu_s=statistics.median(cpus), runs=repeats)


@contextmanager
def stopwatch() -> Iterator[Callable[[], tuple[float, float]]]:
    """Gives a function that returns (wall, CPU) seconds since the block began."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield lambda: (time.perf_counter() - wall, time.process_time() - cpu)


def run_watched(command: Sequence[str]) -> tuple[str, int]:
    """Run a command; returns what it printed and the most anonymous memory (RssAnon) it was seen with, in bytes.

    RssAnon leaves the page cache out: what is counted is what the process itself holds. Raises CalledProcessError.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        peak = 0
        while child.poll() is None:
            peak = max(peak, _anonymous_bytes(child.pid))
            time.sleep(_SAMPLE_EVERY_S)
        printed = "" if child.stdout is None else child.stdout.read()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, printed)
    return printed, peak


def machine(directory: Path) -> dict[str, str]:
    """The facts a figure is worth nothing without. `directory` is where the benchmark's files lie."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "CPU": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores usable of {os.cpu_count()}",
        "RAM": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "GPU": gpu() or "none",
        "software": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem_type(directory),
        "commit": _commit(),
    }


def gpu() -> str | None:
    """Name, memory and driver of the CUDA devices, or None."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return "; ".join(done.stdout.strip().splitlines()) or None if done.returncode == 0 else None


def print_machine(facts: dict[str, str], out: Console) -> None:
    for name, fact in facts.items():
        out.print(f"[bold]{name:>10}[/bold]  {fact}", highlight=False, soft_wrap=True)
    if facts["GPU"] == "none":
        out.print(Panel(NO_DEVICE, expand=False, style="yellow"))


def print_report(report: Report, out: Console) -> None:
    table = Table(title=report.title)
    for column in report.columns:
        numeric = any(isinstance(row.get(column), int | float) for row in report.rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in report.rows:
        table.add_row(*(_cell(row.get(column)) for column in report.columns))
    out.print(table)
    for note in report.notes:
        out.print(note, highlight=False, soft_wrap=True)


def emit(reports: Sequence[Report], *, directory: Path, as_json: bool, as_csv: bool) -> None:
    """Print everything a benchmark found: for people, as one JSON object, or as the rows of its tables in CSV."""
    facts = machine(directory)
    if as_json:
        told = {"machine": facts, "reports": [{"title": r.title, "rows": r.rows, "notes": r.notes} for r in reports]}
        print(json.dumps(told))
    elif as_csv:
        _print_csv(reports)
    else:
        out = Console()
        print_machine(facts, out)
        for report in reports:
            print_report(report, out)


def _print_csv(reports: Iterable[Report]) -> None:
    for report in reports:
        writer = csv.DictWriter(sys.stdout, fieldnames=["table", *report.columns], restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({"table": report.title, **row} for row in report.rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
