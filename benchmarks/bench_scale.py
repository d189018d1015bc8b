"""How preparing, committing and the disk path grow: with the model, the changes, the tensors, the chain and the ranks.

One quantity grows, the others stay; each point is a stream of its own, followed on the live path (`WeightSync`) and on
the disk path (`pull`, then a reload of all tensors), on the same data. Two claims are judged by slopes of logarithms:
the commit does not depend on the size of the model at a fixed number of changes (`verify="before"`: with
"before+after" the changed tensors are read again, which does), and is at most linear in the changes. A third is
counted: how many calls a commit makes does not depend on the number of tensors. Every followed state is compared with
the published one; if one is wrong, no figure is printed.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import click
from harness import Report, emit
from scaling import TIMES, Followed, Scale, follow, slope

MAX_SIZE_SLOPE = 0.1
MAX_CHANGE_SLOPE = 1.1
SIZES = {"toy": 2 << 20, "256MB": 256_000_000, "1GB": 1_000_000_000, "3GB": 3_000_000_000}
AXES = {
    "size": ("nbytes", "MB of model"),
    "changes": ("changes", "elements changed"),
    "tensors": ("tensors", "tensors"),
    "chain": ("chain", "versions at once"),
    "ranks": ("ranks", "ranks"),
}
COLUMNS = {
    "pull_s": "pull s",
    "reload_s": "reload s",
    "prepare_s": "prepare s",
    "commit_s": "commit ms",
    "fingerprint_s": "verify ms",
    "operations": "calls",
    "wire_bytes": "wire MB",
}
EXCHANGED = "sent KB"
_FACTORS = {"commit_s": 1e3, "fingerprint_s": 1e3, "operations": 1, "wire_bytes": 1e-6, "exchanged_bytes": 1e-3}

Points = Sequence[tuple[int, Followed]]


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="1GB", show_default=True, help="The largest model.")
@click.option("--axis", "axes", type=click.Choice(list(AXES)), multiple=True, help="Only these; all by default.")
@click.option("--encoding", type=click.Choice(["xor", "overwrite", "gpusync"]), default="xor", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Measured targets of each point, after a warm-up.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    size: str,
    axes: tuple[str, ...],
    encoding: str,
    repeats: int,
    work_dir: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-scale-", dir=work_dir) as temporary:

        @cache  # the middle point stands on every axis
        def measured(scale: Scale) -> Followed:
            return follow(Path(temporary), scale, encoding=encoding, repeats=repeats)

        reports = []
        for axis in axes or AXES:
            field = AXES[axis][0]
            points = [(getattr(scale, field), measured(scale)) for scale in scales(axis, size)]
            reports.append(axis_report(axis, points, is_toy=size == "toy"))
        emit(reports, directory=Path(temporary), as_json=as_json, as_csv=as_csv)


def scales(axis: str, size: str) -> list[Scale]:
    """The points of an axis, smallest first: around one middle point, or up to the largest model."""
    largest, toy = SIZES[size], size == "toy"
    # 1 % of the smallest model's elements. More would share cache lines there, and only there.
    middle = Scale(nbytes=largest // 4, changes=largest // (2 * 16 * 100))
    values: Mapping[str, Sequence[int]] = {
        "size": [largest // 4, largest] if toy else [largest // 16, largest // 8, largest // 4, largest // 2, largest],
        "changes": [middle.changes, 4 * middle.changes] if toy else [middle.changes * 4**n // 4 for n in range(4)],
        "tensors": [16, 64] if toy else [4, 16, 64, 256, 1024, 4096],
        "chain": [1, 2] if toy else [1, 2, 4, 8],
        "ranks": [1, 2] if toy else [1, 2, 4],
    }
    return [dataclasses.replace(middle, **{AXES[axis][0]: value}) for value in values[axis]]


def axis_report(axis: str, points: Points, *, is_toy: bool) -> Report:
    """A row per point, and one with the slopes."""
    _, title = AXES[axis]
    rows: list[dict[str, object]] = [{title: _told(axis, value), **_row(followed)} for value, followed in points]
    slopes = {name: _slope(points, name) for name in TIMES}
    rows.append({title: "slope", **{COLUMNS[name]: slopes[name] for name in TIMES if name in COLUMNS}})
    return Report(
        title=f"growth with {title}",
        columns=(title, *COLUMNS.values(), *([EXCHANGED] if axis == "ranks" else [])),
        rows=rows,
        notes=[*_claims(axis, points, slopes, is_toy), "every state, live and on disk, was the published one"],
    )


def _claims(axis: str, points: Points, slopes: Mapping[str, float | None], is_toy: bool) -> list[str]:
    notes = []
    calls = sorted({followed.operations for _, followed in points})
    if axis in ("size", "changes", "tensors"):
        held = "held" if len(calls) == 1 else "NOT HELD"
        notes.append(f"calls of a commit do not depend on the {AXES[axis][1]}: {held} ({', '.join(map(str, calls))})")
    before, after = slopes["commit_s"], slopes["pause_s"]
    both = f"slope {before:.2f} with verify before, {after:.2f} with verify before and after"
    if axis == "size":
        told = _judged(before <= MAX_SIZE_SLOPE, f"at most {MAX_SIZE_SLOPE}", is_toy)
        notes.append(f"commit over model size: {both} {told}")
    if axis == "changes":
        told = _judged(before <= MAX_CHANGE_SLOPE, f"at most linear, {MAX_CHANGE_SLOPE}", is_toy)
        notes.append(f"commit over changes: {both} {told}; what it takes with few changes makes it flatter")
    return notes


def _judged(holds: bool, claim: str, is_toy: bool) -> str:
    return "(toy size: not judged)" if is_toy else f"(claim: {claim}; {'held' if holds else 'NOT HELD'})"


def _slope(points: Points, name: str) -> float:
    return slope((value, getattr(followed, name)) for value, followed in points) or 0.0


def _row(followed: Followed) -> dict[str, object]:
    named = {**COLUMNS, "exchanged_bytes": EXCHANGED}
    return {column: getattr(followed, name) * _FACTORS.get(name, 1.0) for name, column in named.items()}


def _told(axis: str, value: int) -> object:
    return value / 1e6 if axis == "size" else value


if __name__ == "__main__":
    main()
