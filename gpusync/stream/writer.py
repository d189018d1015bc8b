"""Writing into a stream: each file once, sequentially, fsynced, closed, and never over another.

What a stream lies on may be an object store behind a mount, where nothing can be renamed, linked, overwritten or
appended to, and where a directory cannot be synced. So a temporary name and a rename are used only where rename is
known to be atomic, and what a filesystem lacks is done without. The order of the files is the caller's duty: the index
last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpusync.errors import PublishError
from gpusync.stream.filesystem import filesystem_type, has_atomic_rename
from gpusync.stream.header import TensorSpec, encode_header
from gpusync.stream.index import INDEX_NAME

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

# What is given to one write call; Linux writes less than 2 GiB at a time anyway.
_WRITE_BYTES = 64 << 20
# How filesystems say that a directory cannot be opened or synced. EIO is not among them: there it means lost data.
_NO_DIRECTORY_SYNC = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EPERM,
    errno.EACCES,
    errno.EISDIR,
    errno.ENOTTY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One tensor of a shard: its bytes in one piece or several, back to back."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer | Sequence[Buffer]

    @property
    def pieces(self) -> Sequence[Buffer]:
        return [self.data] if isinstance(self.data, (bytes, bytearray, memoryview, np.ndarray)) else self.data

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(piece) for piece in self.pieces)


def write_shard(
    directory: str | os.PathLike[str],
    name: str,
    entries: Sequence[ShardEntry],
    metadata: dict[str, str],
    *,
    atomic_rename: bool | None = None,
) -> int:
    """Write a safetensors file that holds `entries` in this order; returns its length in bytes.

    The first tensor starts at a multiple of 8; a later one does if those before it are multiples of 8. Raises
    HeaderError for entries that no reader would take, PublishError as `write_file`.
    """
    specs = [TensorSpec(name=e.name, dtype=e.dtype, shape=e.shape, nbytes=e.nbytes) for e in entries]
    chunks: list[Buffer] = [encode_header(specs, metadata)]
    for entry in entries:
        chunks.extend(entry.pieces)
    return write_file(directory, name, chunks, atomic_rename=atomic_rename)


def write_index(directory: str | os.PathLike[str], index: bytes, *, atomic_rename: bool | None = None) -> int:
    """Write the index, which publishes the version: every file it names must have been written. Errors as above."""
    return write_file(directory, INDEX_NAME, [index], atomic_rename=atomic_rename)


def write_file(
    directory: str | os.PathLike[str], name: str, chunks: Sequence[Buffer], *, atomic_rename: bool | None = None
) -> int:
    """Write `chunks` to a new file; returns its length in bytes. The file is durable, as far as its filesystem can.

    `atomic_rename` None asks the filesystem's type. Raises PublishError with the path, also if the name is taken;
    nothing is left behind then, as far as the filesystem lets files be removed.
    """
    directory = Path(directory)
    final = directory / name
    renames = has_atomic_rename(filesystem_type(directory)) if atomic_rename is None else atomic_rename
    if os.path.lexists(final):
        raise PublishError("a file of this name is there already; a stream's files are never written over", path=final)
    try:
        if not (renames and _write_and_rename(final, chunks)):
            _write_new(final, chunks)
        _sync_new_name(final, strict=renames)
    except OSError as error:
        raise PublishError(f"cannot write: {error.strerror or error}", path=final) from error
    return sum(_nbytes(chunk) for chunk in chunks)


def make_version_directory(directory: str | os.PathLike[str]) -> None:
    """Make a version directory and its parents, and their entries durable; it may be there already.

    Every rank does this for itself: on an object store, and on a network filesystem for a while, a rank sees only the
    directory entries that it made. Raises PublishError.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sync_directory(directory.parent, strict=has_atomic_rename(filesystem_type(directory)))
    except OSError as error:
        raise PublishError(f"cannot make the directory: {error.strerror or error}", path=directory) from error


def remove_file(path: str | os.PathLike[str]) -> bool:
    """Remove a file of an attempt that failed, if the filesystem lets it; whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write_and_rename(final: Path, chunks: Sequence[Buffer]) -> bool:
    """False where the filesystem, against what its type promises, does not rename; nothing is left then."""
    # Not *.safetensors: slime's receiver takes every file that ends so.
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
    _write_new(temporary, chunks)
    try:
        os.rename(temporary, final)
    except OSError:
        # A network filesystem that lost its server's answer reports an error for a rename that was done.
        done = os.path.lexists(final) and not os.path.lexists(temporary)
        remove_file(temporary)
        return done
    return True


def _write_new(path: Path, chunks: Sequence[Buffer]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            for chunk in chunks:
                _write_all(descriptor, chunk)
            os.fsync(descriptor)
        finally:
            # An object store uploads on close, and says then what went wrong.
            os.close(descriptor)
    except BaseException:
        remove_file(path)
        raise


def _write_all(descriptor: int, chunk: Buffer) -> None:
    view = _view(chunk)
    while view:
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]


def _sync_new_name(final: Path, *, strict: bool) -> None:
    try:
        _sync_directory(final.parent, strict=strict)
    except OSError:
        remove_file(final)
        raise


def _sync_directory(directory: Path, *, strict: bool) -> None:
    """Make names durable. Not `strict`: an object store, where a directory is no file and any error means just that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    except OSError as error:
        if strict and error.errno not in _NO_DIRECTORY_SYNC:
            raise


def _view(chunk: Buffer) -> memoryview:
    if isinstance(chunk, np.ndarray):
        # A view of a contiguous array, never a copy; memoryview refuses shapes with a zero.
        return memoryview(chunk.reshape(-1).view(np.uint8)) if chunk.size else memoryview(b"")
    view = memoryview(chunk)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _nbytes(chunk: Buffer) -> int:
    return chunk.nbytes if isinstance(chunk, (memoryview, np.ndarray)) else len(chunk)
