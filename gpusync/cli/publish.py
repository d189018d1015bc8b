"""`gpusync publish`: one version from two checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import click

from gpusync.cli.output import json_option
from gpusync.codec import ENCODINGS
from gpusync.digest import ALGORITHMS


@click.command("publish")
@click.option("--source-dir", type=click.Path(path_type=Path), required=True, help="The stream to publish into.")
@click.option("--base", type=click.Path(path_type=Path, exists=True), help="Checkpoint the delta starts from.")
@click.option("--new", type=click.Path(path_type=Path, exists=True), required=True, help="Checkpoint to publish.")
@click.option("--version", type=click.IntRange(min=1), help="Default: one more than the newest.")
@click.option("--full", is_flag=True, help="Publish a full version: a new start for chains.")
@click.option("--encoding", type=click.Choice(ENCODINGS), default="xor", show_default=True)
@click.option("--checksum", type=click.Choice(ALGORITHMS), default="xxh3-128", show_default=True)
@json_option
def publish_command(
    source_dir: Path,
    base: Path | None,
    new: Path,
    version: int | None,
    full: bool,
    encoding: str,
    checksum: str,
    as_json: bool,
) -> None:
    """Publish the checkpoint NEW, as the difference to the checkpoint BASE or in full."""
    if base is None and not full:
        raise click.UsageError("--base is needed for a delta; --full publishes without one")
    raise NotImplementedError
