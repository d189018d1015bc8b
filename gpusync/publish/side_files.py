"""The files beside the weights that a full version carries along: configuration and tokenizer, never code."""

from __future__ import annotations

from pathlib import Path

from gpusync.errors import PublishError
from gpusync.stream import remove_file, write_file

SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_INDEX_SUFFIX = ".index.json"


def list_side_files(directory: Path) -> list[Path]:
    """The side files of a checkpoint directory, links to files among them; no index, no `*.py`, nothing hidden."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise PublishError(f"cannot list side files: {error.strerror}", path=directory) from error
    return [entry for entry in entries if is_side_file_name(entry.name) and entry.is_file()]


def is_side_file_name(name: str) -> bool:
    """Whether a file of this name follows a full version."""
    return name.endswith(SIDE_SUFFIXES) and not name.endswith(_INDEX_SUFFIX) and not name.startswith(".")


def copy_side_file(path: Path, directory: Path) -> None:
    """Copy one into an unpublished version directory; that of an earlier attempt makes way. Raises PublishError."""
    remove_file(directory / path.name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PublishError(f"cannot read a side file: {error.strerror}", path=path) from error
    write_file(directory, path.name, [data])
