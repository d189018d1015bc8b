"""The shards of one directory, held against its index: all there, in full, with exactly the names it gives."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gpusync.digest import is_checksum
from gpusync.errors import HeaderError, IndexFormatError, SourceReadError, VersionMissingError, Where
from gpusync.stream.files import ByteSource, SourceFile
from gpusync.stream.header import ShardHeader, ShortShardError, read_header
from gpusync.stream.index import VersionIndex
from gpusync.stream.open_files import OpenFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """An entry of a shard: a tensor, or in a delta version the payload that changes it (then `dtype` is U8).

    `file` is the shard's name in its directory, `offset` counts from the start of the file. `checksum` is that of the
    tensor (in a delta, of its new state) by the index's `checksum_format`, `payload_checksum` the xxh3-64 of the entry.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    checksum: str | None = None
    payload_checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """`tensors` follow the index; `duplicates` are (kept, other) where a second shard holds the same name."""

    headers: Mapping[str, ShardHeader]
    tensors: Mapping[str, StoredTensor]
    duplicates: tuple[tuple[StoredTensor, StoredTensor], ...]

    @property
    def hold_only_byte_vectors(self) -> bool:
        """True where no entry can be told from a payload; also where there is no entry."""
        return all(tensor.dtype == "U8" and len(tensor.shape) == 1 for tensor in self.tensors.values())


def read_shards(directory: Path, index: VersionIndex, *, follow_links: bool, where: Where) -> Shards:
    """All shards that `index` names, with their headers valid and their names the index's.

    Raises VersionMissingError for a shard that is not there, ShortShardError for one that is too short, but only when
    nothing is wrong that waiting cannot mend: HeaderError, IndexFormatError, StreamError come first.
    """
    headers = _read_headers(directory, index, follow_links=follow_links, where=where)
    twice = _match_names(directory, headers, index.weight_map, where=where)

    paths = {file: directory / file for file in headers}

    def stored(name: str, file: str) -> StoredTensor:
        entry = headers[file].tensors[name]
        return StoredTensor(
            name=name,
            dtype=entry.dtype,
            shape=entry.shape,
            file=file,
            offset=entry.offset,
            nbytes=entry.nbytes,
            checksum=_checksum(
                name, headers[file], index.checksum_format, where=Where(path=paths[file], version=where.version)
            ),
            payload_checksum=index.payload_checksums.get(name),
        )

    tensors = {name: stored(name, file) for name, file in index.weight_map.items()}
    duplicates = tuple((tensors[name], stored(name, file)) for name, file in twice)
    return Shards(headers=headers, tensors=tensors, duplicates=duplicates)


def open_stored(
    directory: Path, tensor: StoredTensor, files: OpenFiles, *, follow_links: bool, version: int | None
) -> AbstractContextManager[ByteSource]:
    """The bytes of an entry. Errors as `OpenFiles.open_range`."""
    path = directory / tensor.file
    where = Where(path=path, version=version, tensor=tensor.name)
    return files.open_range(path, offset=tensor.offset, nbytes=tensor.nbytes, follow_links=follow_links, where=where)


def _read_headers(directory: Path, index: VersionIndex, *, follow_links: bool, where: Where) -> dict[str, ShardHeader]:
    headers: dict[str, ShardHeader] = {}
    not_yet: VersionMissingError | SourceReadError | ShortShardError | None = None
    for name in dict.fromkeys(index.weight_map.values()):
        place = Where(path=directory / name, version=where.version)
        try:
            headers[name] = _read_header(
                directory / name, declared=index.shard_bytes.get(name), follow_links=follow_links, where=place
            )
        except (VersionMissingError, SourceReadError, ShortShardError) as problem:
            not_yet = not_yet or problem
    if not_yet is not None:
        raise not_yet
    return headers


def _read_header(path: Path, *, declared: int | None, follow_links: bool, where: Where) -> ShardHeader:
    with SourceFile(path, follow_links=follow_links, where=where) as file:
        if declared is not None and file.nbytes != declared:
            kind = ShortShardError if file.nbytes < declared else HeaderError
            raise kind("shard is not as long as the index says", where=where, expected=declared, found=file.nbytes)
        try:
            return read_header(file, where=where)
        except ShortShardError as problem:
            if declared is None:
                raise
            # All of the file that will ever come is there.
            raise HeaderError(problem.what, where=where, expected=problem.expected, found=problem.found) from problem


def _match_names(
    directory: Path, headers: Mapping[str, ShardHeader], weight_map: Mapping[str, str], *, where: Where
) -> list[tuple[str, str]]:
    """The (name, shard) that a second shard holds. A name that index and headers do not share is an error."""
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise IndexFormatError(
                "weight_map names a tensor that its shard does not hold",
                where=Where(path=directory / file, version=where.version, tensor=name),
            )
    twice = []
    for file, header in headers.items():
        for name in header.tensors:
            mapped = weight_map.get(name)
            if mapped is None:
                raise IndexFormatError(
                    "shard holds a tensor that weight_map does not name",
                    where=Where(path=directory / file, version=where.version, tensor=name),
                )
            if mapped != file:
                twice.append((name, file))
    return twice


def _checksum(name: str, header: ShardHeader, algorithm: str | None, *, where: Where) -> str | None:
    """The tensor's checksum. Where the index names an algorithm, every tensor has one."""
    if algorithm is None:
        return None
    checksum = header.metadata.get(name)
    if checksum is None:
        raise HeaderError("tensor has no checksum", where=where, tensor=name, expected=f"{algorithm} in __metadata__")
    if not is_checksum(algorithm, checksum):
        shown = checksum if len(checksum) <= 80 else f"{checksum[:80]}..."
        raise HeaderError("checksum is malformed", where=where, tensor=name, expected=algorithm, found=shown)
    return checksum
