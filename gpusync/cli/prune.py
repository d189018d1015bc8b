"""`gpusync prune`: remove old versions of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import click

from gpusync.cli.output import json_option, print_json, size_text
from gpusync.publish import PruneReport, prune_stream
from gpusync.publish.retention import Reason

_WHY: dict[Reason, str] = {
    "newest": "newest",
    "anchor": "full, one of every so many",
    "needed": "kept versions build on them",
    "unsure": "a version that is missing may build on them",
}


@click.command("prune")
@click.argument("source_dir", type=click.Path(path_type=Path))
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="Keep the newest so many versions.")
@click.option(
    "--keep-full-every",
    type=click.IntRange(min=0),
    default=0,
    help="Also keep the first full version of every so many numbers; 0: none for that reason alone.",
    show_default=True,
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@json_option
def prune_command(source_dir: Path, keep_last: int, keep_full_every: int, dry_run: bool, as_json: bool) -> None:
    """Remove old versions of the stream in SOURCE_DIR.

    Whatever a version that is kept builds on is kept too, back to a full version or to the engines' base: a stream
    without full versions keeps everything. Run again after an interruption.
    """
    report = prune_stream(source_dir, keep_last=keep_last, keep_full_every=keep_full_every, dry_run=dry_run)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(_prune_text(report))


def _prune_text(report: PruneReport) -> str:
    removed = "would remove" if report.dry_run else "removed"
    lines = [f"{removed} {_versions(report.removed)}, {size_text(report.freed_bytes)}; kept {_versions(report.kept)}"]
    if report.finished:
        lines.append(f"of these an earlier run had begun with {_versions(report.finished)}")
    for reason, why in _WHY.items():
        if versions := [version for version, found in report.kept.items() if found == reason]:
            lines.append(f"kept {_versions(versions)}: {why}")
    lines += [f"not ours, left in {path}: {', '.join(names)}" for path, names in report.left.items()]
    return "\n".join(lines)


def _versions(versions: Iterable[int]) -> str:
    """ "versions 1-3, 7"; neighbours are told as a range."""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"version{'s' if len(runs) > 1 or '-' in told else ''} {told}" if told else "no version"
