"""The command line. Exit 0; 1 with one line on stderr when something is wrong; 2 for wrong usage."""

from gpusync.cli.main import main

__all__ = ["main"]
