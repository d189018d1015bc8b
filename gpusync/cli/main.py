"""The `gpusync` command's way in. Imports next to nothing, so that an interrupt finds it ready from the start."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpusync.cli.commands import cli

__all__ = ["cli", "main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    try:
        from gpusync.cli.commands import run  # imports numpy and more, which can take seconds

        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        sys.stderr.write("gpusync: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output has gone (`| head`): nothing is left to say, and Python must not say it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def __getattr__(name: str) -> object:
    if name != "cli":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpusync.cli.commands import cli

    return cli
