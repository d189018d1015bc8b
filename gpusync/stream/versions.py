"""Names of version directories, and which of them exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpusync.errors import ChainError, SourceReadError, VersionMissingError
from gpusync.stream.limits import MAX_VERSION

_NAME = re.compile(r"weight_v([0-9]{6,13})")


def version_dir_name(version: int) -> str:
    """`weight_v000042`; more than six digits from a million on. Raises ChainError for what is no version number."""
    if not 0 <= version <= MAX_VERSION:
        raise ChainError("no version has this number", expected=f"0..{MAX_VERSION}", found=version)
    return f"weight_v{version:06d}"


def parse_version_dir_name(name: str) -> int | None:
    """The number of a version directory, or None for every other name (also for one with a zero too many)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    version = int(match[1])
    return version if version <= MAX_VERSION and version_dir_name(version) == name else None


def version_path(source_dir: str | os.PathLike[str], version: int) -> Path:
    """Where a version lies, whether or not it is there."""
    return Path(source_dir) / version_dir_name(version)


def list_versions(source_dir: str | os.PathLike[str]) -> list[int]:
    """Numbers of all version directories, ascending. That one is listed does not mean that it is published.

    Raises VersionMissingError where there is no such directory, SourceReadError where it cannot be listed.
    """
    try:
        names = os.listdir(source_dir)
    except FileNotFoundError as problem:
        raise VersionMissingError("source directory is not there", path=source_dir) from problem
    except OSError as problem:
        raise SourceReadError("source directory cannot be listed", path=source_dir, found=problem.strerror) from problem
    return sorted(version for name in names if (version := parse_version_dir_name(name)) is not None)
