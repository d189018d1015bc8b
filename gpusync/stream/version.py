"""One published version, checked from its directory down to the length of every payload before anything is decoded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import ChainError, HeaderError, PayloadError, StreamError, VersionMissingError, Where
from gpusync.stream.checkpoint import check_full
from gpusync.stream.directory import check_directory, read_index_file, read_single_file_index
from gpusync.stream.files import ByteSource
from gpusync.stream.formats import PAYLOAD_DTYPE, max_payload_bytes
from gpusync.stream.header import ShardHeader, ShortShardError
from gpusync.stream.index import INDEX_NAME, VersionIndex
from gpusync.stream.open_files import OpenFiles
from gpusync.stream.shards import Shards, StoredTensor, open_stored, read_shards
from gpusync.stream.versions import version_path

_COMPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version that is there in full and valid. `tensors` are payloads in a delta, else the tensors themselves.

    `duplicates` are (kept, other): a tensor of a delta in two shards, which `compare_duplicates` must find equal.
    `wire_bytes` is what a reader of all its files transfers.
    """

    version: int
    path: Path
    index: VersionIndex
    tensors: Mapping[str, StoredTensor]
    headers: Mapping[str, ShardHeader]
    duplicates: tuple[tuple[StoredTensor, StoredTensor], ...]
    wire_bytes: int
    follow_links: bool

    @property
    def is_delta(self) -> bool:
        return self.index.is_delta

    def open_payload(self, name: str, files: OpenFiles) -> AbstractContextManager[ByteSource]:
        """The stored bytes of a tensor. Raises KeyError for none of this version, else as `OpenFiles.open_range`."""
        return self._open(self.tensors[name], files)

    open_tensor = open_payload

    def _open(self, tensor: StoredTensor, files: OpenFiles) -> AbstractContextManager[ByteSource]:
        return open_stored(self.path, tensor, files, follow_links=self.follow_links, version=self.version)

    def where(self, tensor: StoredTensor) -> Where:
        """The place of an entry, for errors."""
        return Where(path=self.path / tensor.file, version=self.version, tensor=tensor.name)


def read_index(source_dir: str | os.PathLike[str], version: int, *, follow_links: bool = False) -> VersionIndex:
    """What the version says it is; its shards are not looked at. That is enough to plan with.

    A full version without an index counts if it is a lone `model.safetensors`. Raises VersionMissingError for a
    version that is not there (yet), IndexFormatError or another StreamError for one that is wrong.
    """
    path = version_path(source_dir, version)
    where = Where(path=path, version=version)
    check_directory(path, follow_links=follow_links, where=where)
    try:
        index = read_index_file(path, follow_links=follow_links, where=where)
        if index is None:
            index = _read_unindexed(path, follow_links=follow_links, where=where)
    except ShortShardError as problem:
        raise _missing(problem) from problem
    if index is None:
        raise VersionMissingError("index is not there", where=where, path=path / INDEX_NAME)
    return index


def read_version(source_dir: str | os.PathLike[str], version: int, *, follow_links: bool = False) -> PublishedVersion:
    """The version, valid in all that can be seen without decoding, and without knowing what it applies to.

    No file is open when it returns. Raises VersionMissingError for what may still come (the directory, the index, a
    shard, the rest of a shard), StreamError or a subclass for what can never become right.
    """
    index = read_index(source_dir, version, follow_links=follow_links)
    path = version_path(source_dir, version)
    where = Where(path=path, version=version)
    try:
        shards = read_shards(path, index, follow_links=follow_links, where=where)
    except ShortShardError as problem:
        raise _missing(problem) from problem
    if index.is_delta:
        _check_payloads(shards, path=path, where=where)
    else:
        check_full(shards, directory=path, where=where)
    return PublishedVersion(
        version=version,
        path=path,
        index=index,
        tensors=shards.tensors,
        headers=shards.headers,
        duplicates=shards.duplicates,
        wire_bytes=index.index_bytes + sum(header.file_bytes for header in shards.headers.values()),
        follow_links=follow_links,
    )


def check_against(version: PublishedVersion, base: Mapping[str, StoredTensor]) -> None:
    """Checks a delta against the tensors it will be applied to; of a full version there is nothing to check.

    Raises ChainError for a tensor that `base` lacks, PayloadError for a payload longer than any honest one.
    """
    encoding = version.index.delta_encoding
    if encoding is None:
        return
    for name, payload in version.tensors.items():
        if name not in base:
            raise ChainError("delta for a tensor that the base does not have", where=version.where(payload))
        limit = max_payload_bytes(encoding, base[name].nbytes)
        if payload.nbytes > limit:
            raise PayloadError(
                f"payload is too long for a tensor of {base[name].nbytes} bytes",
                where=version.where(payload),
                expected=f"at most {limit}",
                found=payload.nbytes,
            )


def compare_duplicates(version: PublishedVersion, files: OpenFiles) -> None:
    """Reads the payloads that stand in two shards. Raises StreamError unless both are the same, checksum included."""
    for kept, other in version.duplicates:
        if kept.checksum != other.checksum:
            raise _differ(version, other, expected=f"checksum {kept.checksum}", found=other.checksum)
        if kept.nbytes != other.nbytes:
            raise _differ(version, other, expected=f"{kept.nbytes} bytes", found=f"{other.nbytes} bytes")
        with version._open(kept, files) as first, version._open(other, files) as second:
            if not _same_bytes(first, second):
                raise _differ(version, other, expected=f"the bytes in {kept.file}", found="others")


def _read_unindexed(path: Path, *, follow_links: bool, where: Where) -> VersionIndex | None:
    index = read_single_file_index(path, follow_links=follow_links, where=where)
    if index is not None:
        shards = read_shards(path, index, follow_links=follow_links, where=where)
        if shards.hold_only_byte_vectors:
            return None  # a shard of a delta whose index is not there yet
    return index


def _missing(problem: ShortShardError) -> VersionMissingError:
    return VersionMissingError(
        problem.what, path=problem.path, version=problem.version, expected=problem.expected, found=problem.found
    )


def _check_payloads(shards: Shards, *, path: Path, where: Where) -> None:
    entries = [*shards.tensors.values(), *(other for _, other in shards.duplicates)]
    for entry in entries:
        if entry.dtype != PAYLOAD_DTYPE or len(entry.shape) != 1:
            raise HeaderError(
                "payload is no vector of bytes",
                where=Where(path=path / entry.file, version=where.version, tensor=entry.name),
                expected=f"{PAYLOAD_DTYPE}, one dimension",
                found=f"{entry.dtype}{list(entry.shape)}",
            )


def _differ(version: PublishedVersion, other: StoredTensor, *, expected: str, found: str | None) -> StreamError:
    what = "tensor stands in two shards that differ"
    return StreamError(what, where=version.where(other), expected=expected, found=found)


def _same_bytes(first: ByteSource, second: ByteSource) -> bool:
    for offset in range(0, first.nbytes, _COMPARE_BYTES):
        nbytes = min(_COMPARE_BYTES, first.nbytes - offset)
        mine, others = bytearray(nbytes), bytearray(nbytes)
        first.read_into(offset, mine)
        second.read_into(offset, others)
        if mine != others:
            return False
    return True
