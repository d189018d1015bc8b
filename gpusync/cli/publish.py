"""`gpusync publish`: one version from two checkpoint directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from gpusync.cli.output import json_option, print_json, size_text
from gpusync.codec import ENCODINGS
from gpusync.digest import ALGORITHMS
from gpusync.errors import PublishError
from gpusync.publish import PublishReport, publish_directories
from gpusync.publish.start import find_newest
from gpusync.stream import read_index, version_path

DIRECTORY = click.Path(path_type=Path)


@click.command("publish", short_help="Publish a checkpoint as one version of a stream.")
@click.option("--source-dir", type=DIRECTORY, required=True, help="The stream to publish into; made when missing.")
@click.option("--base", type=DIRECTORY, help="The checkpoint that readers hold now: the newest version's state.")
@click.option(
    "--base-version",
    type=click.IntRange(min=0),
    help="An older version whose state BASE is: a shortcut for readers that are still there.",
)
@click.option("--new", type=DIRECTORY, required=True, help="The checkpoint to publish.")
@click.option("--version", type=click.IntRange(min=1), help="Default: one more than the newest.")
@click.option(
    "--full",
    is_flag=True,
    help="Publish all of NEW with its side files, a new start for chains; without --base, NEW has to be complete.",
)
@click.option(
    "--encoding",
    type=click.Choice(ENCODINGS),
    default="gpusync",
    show_default=True,
    help="slime's receiver reads xor and overwrite.",
)
@click.option("--checksum", type=click.Choice(ALGORITHMS), default="xxh3-128", show_default=True, help="Of new states.")
@click.option(
    "--post-write-hook",
    help="hook(version_dir), as pkg.mod.fn or pkg.mod:fn; runs after the shards and after the index.",
)
@json_option
def publish_command(
    source_dir: Path,
    base: Path | None,
    base_version: int | None,
    new: Path,
    version: int | None,
    full: bool,
    encoding: str,
    checksum: str,
    post_write_hook: str | None,
    as_json: bool,
) -> None:
    """Publish the checkpoint NEW: as the difference to the checkpoint BASE, or in full."""
    if base is None and not full:
        raise click.UsageError("--base is needed for a delta; --full publishes without one")
    if base_version is not None and full:
        raise click.UsageError("--base-version is for a delta; a full version builds on none")
    report = publish_directories(
        source_dir,
        base_dir=base,
        new_dir=new,
        full=full,
        encoding=encoding,
        checksum=checksum,
        post_write_hook=post_write_hook,
        **_place(source_dir, version, base_version),
    )
    if as_json:
        print_json({**dataclasses.asdict(report), "density": report.density})
    else:
        click.echo(_publish_text(report))


def _place(source_dir: Path, version: int | None, base_version: int | None) -> dict[str, Any]:
    """Where the new version stands: on the newest one, or on an older one, in the same stream."""
    found = find_newest(source_dir)
    newest, index = (0, None) if found is None else found
    if base_version is None or base_version == newest:
        return {"version": version, "base_version": newest, "resume": found is not None}
    if base_version:
        read_index(source_dir, base_version)
    version = newest + 1 if version is None else version
    if version <= newest or base_version > newest:
        raise PublishError(
            "versions only go up",
            path=version_path(source_dir, version),
            expected=f"a version above {newest}, on one of at most {newest}",
            found=f"{version} on {base_version}",
        )
    return {"version": version, "base_version": base_version, "stream_id": None if index is None else index.stream_id}


def _publish_text(report: PublishReport) -> str:
    kind = "in full" if report.kind == "full" else f"on version {report.base_version}"
    text = (
        f"version {report.version} {kind}: {report.tensors_changed} of {report.tensors_offered} tensors changed, "
        f"{100 * report.density:.3g} % of bytes, {size_text(report.wire_bytes)} written "
        f"in {report.seconds['total']:.2f} s"
    )
    return text + "".join(f"\nwarning: {warning}" for warning in report.warnings)
