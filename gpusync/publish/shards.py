"""The files one rank writes into one version directory, in one attempt.

Names carry the rank and the attempt, so that no two writers and no two attempts ever meet in a file, and so that what a
dead attempt left behind can be told: slime's receiver reads every `*.safetensors` in the directory, whether or not the
index names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from gpusync.errors import PublishError
from gpusync.publish.encode import Stored
from gpusync.publish.writers import QUIET_SECONDS, begin_attempt, end_attempt, may_be_under_way
from gpusync.stream import INDEX_NAME, METADATA_KEY, ShardEntry, SourceFile, read_header, remove_file, write_shard

# A token of 12 digits, which says nothing, is that of an earlier release.
_SHARD = r"(?:delta|model)-([0-9]{5})-of-[0-9]{5}-([0-9a-f]{24}|[0-9a-f]{12})-[0-9]{5}\.safetensors"
# Also under the temporary name that a writer which died left.
_OWN_NAME = re.compile(rf"\.?{_SHARD}(?:\.[0-9a-f]+\.tmp)?")
_ALIGNMENT = 8
# What a full version's shards say of themselves beside the checksums; transformers asks for it.
_FULL_METADATA = {"format": "pt"}


class ShardSet:
    """Collects what is to be written and writes it, a shard whenever `shard_bytes` have come together.

    Holds at most `shard_bytes` and one tensor. After an error, and after `remove`, it is of no further use. Until
    `close` no publisher of this host takes its files for left over.
    """

    def __init__(self, directory: Path, *, is_full: bool, rank: int, size: int, shard_bytes: int) -> None:
        self.directory = directory
        self.files: dict[str, int] = {}
        self.weight_map: dict[str, str] = {}
        self.payload_checksums: dict[str, str] = {}
        self._rank = rank
        self._size = size
        self._attempt = begin_attempt()
        self._stem = f"{'model' if is_full else 'delta'}-{rank:05d}-of-{size:05d}-{self._attempt}"
        self._metadata = _FULL_METADATA if is_full else {}
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Stored] = {}
        self._pending_bytes = 0
        self._begun: list[str] = []

    def add(self, stored: Stored) -> None:
        """Take a tensor; it is written now or later. Raises PublishError."""
        if stored.name == METADATA_KEY or stored.name in self._metadata:
            raise PublishError("a tensor of a full version cannot be named so", tensor=stored.name)
        self._pending[stored.name] = stored
        self._pending_bytes += stored.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; nothing is pending then. Raises PublishError."""
        # Whole multiples of 8 first, so that as many tensors as can be start at one, and every one at its own width.
        stored = sorted(self._pending.values(), key=lambda tensor: (-_alignment(tensor.nbytes), tensor.name))
        self._pending.clear()
        self._pending_bytes = 0
        self._write(stored)

    def drop(self, names: Collection[str]) -> None:
        """Write these tensors not, or no longer: another rank does. Shards that hold them are written anew without."""
        for name in names:
            pending = self._pending.pop(name, None)
            self._pending_bytes -= 0 if pending is None else pending.nbytes
        for file in {self.weight_map[name] for name in names if name in self.weight_map}:
            rest = self._read(file, without=names)
            if not remove_file(self.directory / file):
                raise PublishError("cannot remove a shard that another one replaces", path=self.directory / file)
            del self.files[file]
            for name in [name for name, holder in self.weight_map.items() if holder == file]:
                del self.weight_map[name]
                del self.payload_checksums[name]
            self._write(rest)

    def check(self) -> None:
        """Raises PublishError unless every shard is there as it was written, and nobody else writes this version.

        Of two publishers at once, each of which writes first and looks then, one at least sees the other.
        """
        for file, nbytes in self.files.items():
            path = self.directory / file
            try:
                found = os.stat(path, follow_symlinks=False).st_size
            except FileNotFoundError:
                raise PublishError("a shard is gone: another publisher writes this version", path=path) from None
            except OSError as error:
                raise PublishError(f"cannot look at a shard: {error.strerror}", path=path) from error
            if found != nbytes:
                what = "a shard is not as it was written: another publisher writes this version"
                raise PublishError(what, path=path, expected=nbytes, found=found)
        for name, attempt in _list_attempts(self.directory, rank=self._rank, size=self._size):
            if attempt != self._attempt and may_be_under_way(attempt, self.directory / name):
                raise _rival(self.directory / name)

    def close(self) -> None:
        """The attempt is over, whatever became of it."""
        end_attempt(self._attempt)

    def remove(self) -> None:
        """Remove every file of this attempt, as far as the filesystem lets it."""
        for file in self._begun:
            remove_file(self.directory / file)
        self.files.clear()
        self.weight_map.clear()

    def _write(self, stored: list[Stored]) -> None:
        if not stored:
            return
        file = f"{self._stem}-{len(self._begun) + 1:05d}.safetensors"
        self._begun.append(file)
        entries = [ShardEntry(name=t.name, dtype=t.dtype, shape=t.shape, data=t.data) for t in stored]
        checksums = {tensor.name: tensor.checksum for tensor in stored}
        self.files[file] = write_shard(self.directory, file, entries, {**self._metadata, **checksums})
        for tensor in stored:
            self.weight_map[tensor.name] = file
            self.payload_checksums[tensor.name] = tensor.payload_checksum

    def _read(self, file: str, *, without: Collection[str]) -> list[Stored]:
        with SourceFile(self.directory / file) as source:
            header = read_header(source)
            return [
                Stored(
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    data=source.read_at(entry.offset, entry.nbytes),
                    checksum=header.metadata[name],
                    payload_checksum=self.payload_checksums[name],
                )
                for name, entry in header.tensors.items()
                if name not in without
            ]


def remove_leftovers(directory: Path, *, rank: int, size: int) -> list[str]:
    """Remove what earlier attempts of this rank left in an unpublished version directory; returns what would not go.

    Rank 0 answers for ranks that are no more. Raises PublishError, with nothing removed: for files of an attempt that
    may be under way; for a version that has been published; on rank 0, for a shard that none of our publishers wrote:
    slime's receiver would apply it with ours.
    """
    attempts = list(_list_attempts(directory, rank=rank, size=size))
    for name, attempt in attempts:
        if may_be_under_way(attempt, directory / name):
            raise _rival(directory / name)
    # Last, so that whatever ended meanwhile has ended with its index or without one.
    names = _list(directory)
    if INDEX_NAME in names:
        raise PublishError("the version was just published by another publisher", path=directory / INDEX_NAME)
    for name in names:
        if rank == 0 and name.endswith(".safetensors") and not is_own_file(name):
            raise PublishError(
                "the unpublished version directory holds a shard of another writer", path=directory / name
            )
    return [name for name, _ in attempts if not remove_file(directory / name)]


def _list_attempts(directory: Path, *, rank: int, size: int) -> Iterator[tuple[str, str]]:
    """The files that this rank answers for, and the attempts they are of."""
    for name in _list(directory):
        match = _OWN_NAME.fullmatch(name)
        if match is not None and (int(match[1]) == rank or (rank == 0 and int(match[1]) >= size)):
            yield name, match[2]


def _list(directory: Path) -> list[str]:
    """An object store's directory may be there only once it has a file."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PublishError(f"cannot list the version directory: {error.strerror}", path=directory) from error


def _rival(path: Path) -> PublishError:
    return PublishError(
        f"another publisher seems to write this version: it lives, or wrote within {QUIET_SECONDS:g} s on another host",
        path=path,
    )


def is_own_file(name: str) -> bool:
    """Whether a publisher of ours gave a file this name: a shard, or one that it died over."""
    return _OWN_NAME.fullmatch(name) is not None


def _alignment(nbytes: int) -> int:
    """The largest power of two, up to 8, that divides `nbytes`."""
    return min(_ALIGNMENT, (nbytes | _ALIGNMENT) & -(nbytes | _ALIGNMENT))
