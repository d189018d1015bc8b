"""What a directory says it holds: its index, or the one file that needs none. Looks by name, never lists."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpusync.digest import digest_of
from gpusync.errors import IndexFormatError, SourceReadError, StreamError, VersionMissingError, Where
from gpusync.stream.files import SourceFile
from gpusync.stream.header import read_header, read_header_bytes
from gpusync.stream.index import INDEX_NAME, VersionIndex, parse_index
from gpusync.stream.limits import MAX_INDEX_BYTES

SINGLE_FILE_NAME = "model.safetensors"


def check_directory(directory: Path, *, follow_links: bool, where: Where) -> None:
    """Raises VersionMissingError where nothing is there, StreamError for a link or anything else but a directory."""
    where = Where(path=directory, version=where.version)
    try:
        mode = os.stat(directory, follow_symlinks=follow_links).st_mode
    except FileNotFoundError as problem:
        raise VersionMissingError("directory is not there", where=where) from problem
    except OSError as problem:
        raise SourceReadError("directory cannot be looked at", where=where, found=problem.strerror) from problem
    if not stat.S_ISDIR(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
        raise StreamError("not a directory", where=where, expected="a directory", found=found)


def read_index_file(directory: Path, *, follow_links: bool, where: Where) -> VersionIndex | None:
    """The directory's index, None where there is none. Errors as `parse_index`, `SourceFile`; an empty file is a
    VersionMissingError, because some network filesystems show a file's name before its bytes.
    """
    where = Where(path=directory / INDEX_NAME, version=where.version)
    try:
        file = SourceFile(directory / INDEX_NAME, follow_links=follow_links, where=where)
    except VersionMissingError:
        return None
    with file:
        if file.nbytes == 0:
            raise VersionMissingError("index is empty", where=where, expected="an object", found="0 bytes")
        if file.nbytes > MAX_INDEX_BYTES:
            raise IndexFormatError(
                "index is too long", where=where, expected=f"at most {MAX_INDEX_BYTES}", found=file.nbytes
            )
        return parse_index(file.read_at(0, file.nbytes), where=where)


def read_single_file_index(directory: Path, *, follow_links: bool, where: Where) -> VersionIndex | None:
    """Stands for the index of a directory that has none but a `model.safetensors`; None where that is not there
    either. Its digest is that of the header's text. Errors as `read_header`.
    """
    where = Where(path=directory / SINGLE_FILE_NAME, version=where.version)
    try:
        file = SourceFile(directory / SINGLE_FILE_NAME, follow_links=follow_links, where=where)
    except VersionMissingError:
        return None
    with file:
        names = read_header(file, where=where).tensors
        digest = digest_of("xxh3-128", read_header_bytes(file, where=where))
    return VersionIndex(version=where.version, weight_map=dict.fromkeys(names, SINGLE_FILE_NAME), digest=digest)
