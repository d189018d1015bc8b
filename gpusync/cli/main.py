"""The `gpusync` command: its subcommands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys

import click

from gpusync.cli.doctor import doctor_command
from gpusync.cli.inspect import inspect_command
from gpusync.cli.prune import prune_command
from gpusync.cli.publish import publish_command
from gpusync.cli.pull import plan_command, pull_command, verify_command
from gpusync.cli.run_demo import demo_command
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
    demo_command,
    doctor_command,
):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    try:
        sys.exit(cli.main(args=arguments, prog_name="gpusync", standalone_mode=False) or 0)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except GpusyncError as error:
        _fail(f"{type(error).__name__}: {error}")
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", code=130)
    except BrokenPipeError:
        # the reader of our output has gone (`| head`): nothing is left to say, and Python must not say it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(text: str, *, code: int = 1) -> None:
    line = f"gpusync: {text}\n"
    sys.stderr.write(
        line.encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(sys.stderr.encoding or "utf-8")
    )
    sys.exit(code)
