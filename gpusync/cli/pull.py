"""`gpusync pull`, `plan` and `verify`: the commands that look at, or change, a local checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from gpusync.cli.output import count_text, json_option, print_json, progress_bar, size_text
from gpusync.disk import DEFAULT_LOCK_TIMEOUT_S, plan, pull
from gpusync.errors import DigestMismatchError, MirrorError, VersionMissingError
from gpusync.mirror.verify import verify_directory
from gpusync.report import PullReport
from gpusync.stream import list_versions, read_checkpoint

F = TypeVar("F", bound=Callable[..., object])

DIRECTORY = click.Path(path_type=Path)

EMPTY = "the local directory is empty"
# What the engine-neutral layers call a store is, for these commands, always the local checkpoint.
REASONS = {
    "continues the store": "continues the local checkpoint",
    "the store holds no version": "the local checkpoint has no known version",
}


class TargetVersion(click.ParamType):  # type: ignore[type-arg]
    """A version number, or `latest`."""

    name = "version"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "latest":
            return None
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a version number nor 'latest'", param, ctx)
        if number < 0:
            self.fail("a version number is 0 or more", param, ctx)
        return number


def place_options(command: F) -> F:
    """The options that name a local checkpoint, its base, the stream and the target."""
    for option in (
        click.option(
            "--target-version",
            type=TargetVersion(),
            default="latest",
            show_default=True,
            help="The version to bring it to: a number, 0 for the base, or latest.",
        ),
        click.option("--allow-rewind", is_flag=True, help="Accept a target below the local version (reseeds)."),
        click.option("--source-dir", type=DIRECTORY, required=True, help="The published stream."),
        click.option("--base-dir", type=DIRECTORY, required=True, help="The checkpoint the engine started from."),
        click.option("--local-checkpoint-dir", type=DIRECTORY, required=True, help="The checkpoint on this host."),
    ):
        command = option(command)
    return command


@click.command("pull")
@place_options
@click.option(
    "--pre-read-hook", help="pkg.mod.fn or pkg.mod:fn, called with (source_dir, target_version) before every look."
)
@click.option("--visibility-timeout", type=float, default=0.0, show_default=True, help="Seconds to wait for a version.")
@click.option(
    "--lock-timeout",
    type=float,
    default=DEFAULT_LOCK_TIMEOUT_S,
    show_default=True,
    help="Seconds to wait for another process that pulls into the same directory.",
)
@click.option("--copy-code", is_flag=True, help="Let *.py files of a full version follow: engines may execute them.")
@click.option("--workers", type=click.IntRange(min=1), help="Threads that decode; default: the cores, at most 8.")
@json_option
def pull_command(target_version: int | None, source_dir: Path, as_json: bool, **options: object) -> None:
    """Bring a local checkpoint to a published version."""
    target = _newest(source_dir) if target_version is None else target_version
    with progress_bar("pulling") as progress:
        report = pull(source_dir=source_dir, target_version=target, progress=progress, **options)  # type: ignore[arg-type]
    report = dataclasses.replace(report, reason=REASONS.get(report.reason, report.reason))
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    tensors = read_checkpoint(str(options["local_checkpoint_dir"])).tensors
    click.echo(_pull_text(report, tensors_held=len(tensors)))


@click.command("plan")
@place_options
@json_option
def plan_command(target_version: int | None, source_dir: Path, as_json: bool, **options: object) -> None:
    """Say what a pull would do, and change nothing.

    From which version it would start, why, and which deltas it would apply.
    """
    target = _newest(source_dir) if target_version is None else target_version
    found = plan(source_dir=source_dir, target_version=target, **options)  # type: ignore[arg-type]
    found = dataclasses.replace(found, reason=REASONS.get(found.reason, found.reason))
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    start = {"store": "local", "full": "full", "base": "base"}[found.seed]
    reason = "first pull" if found.reason == EMPTY else found.reason
    steps = "nothing to apply" if not found.chain else "apply " + ", ".join(map(str, found.chain))
    click.echo(f"target {found.target}: start from {start} version {found.seed_version} ({reason}), {steps}")


@click.command("verify")
@click.argument("directory", type=DIRECTORY)
@json_option
def verify_command(directory: Path, as_json: bool) -> None:
    """Compare a local checkpoint with its checksums.

    Every tensor with its newest one. Needs nothing but the directory.
    """
    if not directory.exists():
        raise MirrorError("directory does not exist", path=directory)
    with progress_bar("verifying") as progress:
        found = verify_directory(directory, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found))
    if found.damage is not None:
        raise DigestMismatchError(
            f"the local checkpoint is not version {found.version}: {found.damage}", path=directory
        )
    if not as_json:
        tensors = count_text(found.tensors, "tensor")
        click.echo(f"version {found.version}: {tensors}, {size_text(found.nbytes)}, all as published")


def _newest(source_dir: Path) -> int:
    versions = list_versions(source_dir)
    if not versions:
        raise VersionMissingError("the stream holds no version", path=source_dir)
    return versions[-1]


def _pull_text(report: PullReport, *, tensors_held: int) -> str:
    if report.shared or not report.changed:
        return f"version {report.target_version}: already there"
    seconds = report.seconds["total"]
    text = f"version {report.target_version}: {count_text(report.tensors_changed, 'tensor')} changed"
    if report.elements_changed is not None:
        text += f" ({count_text(report.elements_changed, 'element')})"
    text += f", {size_text(report.wire_bytes)} read, {size_text(report.tensor_bytes)} verified in {seconds:.2f} s"
    seed = f"{report.seed} version {report.seed_version}"
    if report.seed != "store" and report.version_before is None and report.reason == EMPTY:
        text += f"; first pull: copied {count_text(tensors_held, 'tensor')} from {seed}"
    elif report.seed != "store":
        text += f"; seeded from {seed} ({report.reason})"
    if report.unverified_tensors:
        without = "has" if report.unverified_tensors == 1 else "have"
        text += f"; {count_text(report.unverified_tensors, 'tensor')} {without} no published checksum"
    return text
