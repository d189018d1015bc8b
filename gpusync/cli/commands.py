"""The subcommands, and the one place where errors become exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import click

from gpusync.cli.doctor import doctor_command
from gpusync.cli.inspect import inspect_command
from gpusync.cli.output import Told, error_facts
from gpusync.cli.prune import prune_command
from gpusync.cli.publish import publish_command
from gpusync.cli.pull import plan_command, pull_command, verify_command
from gpusync.cli.run_demo import demo_command
from gpusync.cli.serve import serve_command
from gpusync.errors import GpusyncError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpusync")
def cli() -> None:
    """Weight synchronisation from RL trainers to LLM inference engines."""


for command in (
    publish_command,
    pull_command,
    verify_command,
    inspect_command,
    plan_command,
    prune_command,
    serve_command,
    demo_command,
    doctor_command,
):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command; the exit code. With --json, stdout gets one object in the end: what was told, and any error."""
    told = Told()
    code = 0
    try:
        with _current_directory_importable():
            cli.main(args=list(arguments), prog_name="gpusync", standalone_mode=False, obj=told)
    except click.UsageError as error:
        error.show()
        code, told.error = 2, error_facts(error)
    except click.ClickException as error:
        code, told.error = 1, error_facts(error)
        complain(error.format_message())
    except GpusyncError as error:
        code, told.error = 1, error_facts(error)
        complain(f"{type(error).__name__}: {error}")
    except click.Abort:
        raise KeyboardInterrupt from None
    answer = {**told.answer, **({} if told.error is None else {"error": told.error})}
    if answer and "--json" in arguments:
        click.echo(json.dumps(answer, ensure_ascii=False))
    return code


def complain(text: str) -> None:
    """One line on stderr, whatever characters that can show."""
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(f"gpusync: {text}\n".encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """A hook beside the user is found, as `python -m` would find it; behind everything that is installed."""
    here = None
    if not getattr(sys.flags, "safe_path", False):
        with suppress(OSError):
            here = os.getcwd()
    if here is None or here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
