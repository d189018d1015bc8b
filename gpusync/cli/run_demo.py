"""`gpusync demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
from rich.console import Console

from gpusync.cli.output import json_option, print_json


@click.command("demo", short_help="Train a small model, publish, pull and verify it.")
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="Run on this checkpoint instead.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keep the streams and checkpoints here.")
@json_option
def demo_command(model_dir: Path | None, work_dir: Path | None, as_json: bool) -> None:
    """Train a small model, publish every step in three encodings, pull, verify, and compare with a full reload."""
    from gpusync.demo.run import run_demo  # imports the trainer: time that other commands need not pay

    out = Console(stderr=as_json)
    result = run_demo(model_dir=model_dir, work_dir=work_dir, out=out)
    if as_json:
        print_json(dataclasses.asdict(result))
