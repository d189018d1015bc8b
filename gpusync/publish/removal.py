"""Taking one published version away, in an order that never leaves a part of it published.

First its index goes, under another name: the version is no longer published, and a later run still knows what it
consisted of. Then its files, then its directory. Only what a version consists of is removed: its index, the shards that
it names, what an attempt of our publishers left beside them, and in a full version the side files. What else lies there
stays, and its directory with it. Links are never followed: the directory is held open while it is emptied.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import PublishError, StreamError, VersionMissingError, Where
from gpusync.publish.shards import is_own_file
from gpusync.publish.side_files import is_side_file_name
from gpusync.stream import (
    INDEX_NAME,
    SourceFile,
    VersionIndex,
    encode_index,
    filesystem_type,
    has_atomic_rename,
    parse_index,
    read_index,
    version_path,
    write_file,
)
from gpusync.stream.directory import SINGLE_FILE_NAME

# Hidden, and no *.safetensors: neither slime's receiver nor ours takes it for anything.
WITHDRAWN_INDEX_NAME = ".withdrawn.index.json"
# What a writer of either leaves when it dies.
_TEMPORARY_INDEX = re.compile(rf"\.({re.escape(INDEX_NAME)}|{re.escape(WITHDRAWN_INDEX_NAME)})\.[0-9a-f]+\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What went, or would go, of one version: the bytes of its files. `left` names what is not ours and stays."""

    nbytes: int
    left: tuple[str, ...]


def is_half_removed(source_dir: Path, version: int) -> bool:
    """Whether the directory, which holds no index, is what an interrupted `remove_version` left: a withdrawn index, or
    nothing at all."""
    path = version_path(source_dir, version)
    try:
        with _open_directory(path) as directory:
            names = os.listdir(directory)
    except PublishError:
        return False
    return WITHDRAWN_INDEX_NAME in names or not names


def measure_version(source_dir: Path, version: int) -> Removal:
    """What `remove_version` would do. Changes nothing."""
    path = version_path(source_dir, version)
    with _open_directory(path) as directory:
        own, left = _sort_out(path, directory, _read_remains(source_dir, version))
    return Removal(nbytes=sum(own.values()), left=left)


def remove_version(source_dir: Path, version: int) -> Removal:
    """Remove a version that is published, or half removed; one that is not there is fine. May be repeated after any
    interruption, and somebody else may be doing the same.

    Raises PublishError, with the path, for what the filesystem does not let go; StreamError for an index that is wrong.
    """
    path = version_path(source_dir, version)
    if not os.path.lexists(path):
        return Removal(nbytes=0, left=())
    index = _read_remains(source_dir, version)
    with _open_directory(path) as directory:
        own, left = _sort_out(path, directory, index)
        _withdraw(path, directory, index)
        for name in own:
            _unlink(path, directory, name)
        # With company the withdrawn index stays: the next run looks again, and says so again.
        if not left:
            _unlink(path, directory, WITHDRAWN_INDEX_NAME)
    if not left:
        # An object store's directory is gone with its last file, or cannot be removed: nothing is left in it anyway.
        with contextlib.suppress(OSError):
            path.rmdir()
    return Removal(nbytes=sum(own.values()), left=left)


def _withdraw(path: Path, directory: int, index: VersionIndex | None) -> None:
    """Make the version unpublished and remember its index. A lone `model.safetensors` is published by itself, so it
    goes before an index that names it: with the index it would be incomplete, without it a full version of its own.
    """
    names = os.listdir(directory)
    if index is not None and INDEX_NAME not in names and WITHDRAWN_INDEX_NAME not in names:
        text = encode_index(version=index.version or 0, weight_map=index.weight_map)
        write_file(path, WITHDRAWN_INDEX_NAME, [text])
    if index is not None and SINGLE_FILE_NAME in index.weight_map.values():
        _unlink(path, directory, SINGLE_FILE_NAME)
    if INDEX_NAME in names and not (has_atomic_rename(filesystem_type(path)) and _rename_index(directory)):
        _copy_index(path, directory)
        _unlink(path, directory, INDEX_NAME)


def _rename_index(directory: int) -> bool:
    """Needs no room, which a stream that is pruned may not have. False where the filesystem does not rename."""
    try:
        os.rename(INDEX_NAME, WITHDRAWN_INDEX_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _copy_index(path: Path, directory: int) -> None:
    try:
        with SourceFile(path / INDEX_NAME) as file:
            text = file.read_at(0, file.nbytes)
    except VersionMissingError:
        return
    _unlink(path, directory, WITHDRAWN_INDEX_NAME)
    write_file(path, WITHDRAWN_INDEX_NAME, [text], atomic_rename=False)


def _read_remains(source_dir: Path, version: int) -> VersionIndex | None:
    """The version's index, or the withdrawn one; None where neither can be read any more."""
    path = version_path(source_dir, version) / WITHDRAWN_INDEX_NAME
    where = Where(path=path, version=version)
    try:
        return read_index(source_dir, version)
    except VersionMissingError:
        pass
    try:
        with SourceFile(path, where=where) as file:
            return parse_index(file.read_at(0, file.nbytes), where=where)
    except (VersionMissingError, StreamError):
        return None


def _sort_out(path: Path, directory: int, index: VersionIndex | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """(the version's files but its index, with their bytes; what is not of it)."""
    shards = set() if index is None else set(index.weight_map.values())
    is_full = index is not None and not index.is_delta
    own, left = {}, []
    for name in sorted(set(os.listdir(directory)) - {INDEX_NAME, WITHDRAWN_INDEX_NAME}):
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # somebody else removes the version too
            continue
        except OSError as error:
            raise PublishError(f"cannot be looked at: {error.strerror}", path=path / name) from error
        is_own = name in shards or is_own_file(name) or _TEMPORARY_INDEX.fullmatch(name) is not None
        if (is_own or (is_full and is_side_file_name(name))) and not stat.S_ISDIR(found.st_mode):
            own[name] = found.st_size
        else:
            left.append(name)
    return own, tuple(left)


@contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PublishError(f"a version directory cannot be opened: {error.strerror}", path=path) from error
    try:
        yield directory
    finally:
        os.close(directory)


def _unlink(path: Path, directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PublishError(f"cannot remove: {error.strerror}", path=path / name) from error
