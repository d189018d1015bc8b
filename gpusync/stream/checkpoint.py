"""A Hugging Face checkpoint in a directory: an engine's base, the local checkpoint, a full version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import NOWHERE, IndexFormatError, StreamError, VersionMissingError, Where
from gpusync.stream.directory import read_index_file, read_single_file_index
from gpusync.stream.files import ByteSource
from gpusync.stream.header import ShardHeader
from gpusync.stream.index import INDEX_NAME, VersionIndex
from gpusync.stream.open_files import OpenFiles
from gpusync.stream.shards import Shards, StoredTensor, open_stored, read_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are all there and valid. `index` is None for a lone `model.safetensors`.

    The checksums of `tensors` are those its files were published with: of files that were changed in place since, they
    say nothing.
    """

    directory: Path
    tensors: Mapping[str, StoredTensor]
    headers: Mapping[str, ShardHeader]
    index: VersionIndex | None
    follow_links: bool

    def open_tensor(self, name: str, files: OpenFiles) -> AbstractContextManager[ByteSource]:
        """The tensor's bytes. Raises KeyError for no tensor of this checkpoint, else as `OpenFiles.open_range`."""
        return open_stored(self.directory, self.tensors[name], files, follow_links=self.follow_links, version=None)


def read_checkpoint(
    directory: str | os.PathLike[str], *, follow_links: bool = False, where: Where = NOWHERE
) -> Checkpoint:
    """The checkpoint in `directory`: the files its index names or, without an index, its `model.safetensors`.

    `follow_links` accepts files that are links, as in a hub cache. `where` adds its version to errors; whatever version
    an index says is fine. Raises VersionMissingError where there is no checkpoint or a file is missing,
    ShortShardError for a file that is cut, StreamError or a subclass for one that is wrong.
    """
    directory = Path(directory)
    index = read_index_file(directory, follow_links=follow_links, where=NOWHERE)
    described = index or read_single_file_index(directory, follow_links=follow_links, where=where)
    if described is None and not os.path.isdir(directory):
        raise VersionMissingError("directory does not exist", where=where, path=directory)
    if described is None:
        raise VersionMissingError("no checkpoint is there", where=where, path=directory / INDEX_NAME)
    if described.is_delta:
        raise StreamError("a delta version is no checkpoint", where=where, path=directory / INDEX_NAME)
    shards = read_shards(directory, described, follow_links=follow_links, where=where)
    check_full(shards, directory=directory, where=where)
    return Checkpoint(
        directory=directory, tensors=shards.tensors, headers=shards.headers, index=index, follow_links=follow_links
    )


def check_full(shards: Shards, *, directory: Path, where: Where) -> None:
    """Raises IndexFormatError for shards that cannot be a whole checkpoint."""
    for _, other in shards.duplicates:
        raise IndexFormatError(
            "tensor stands in two shards", where=where, path=directory / other.file, tensor=other.name
        )
    if shards.hold_only_byte_vectors:
        raise IndexFormatError(
            "index has no delta_encoding, but its shards hold nothing but byte vectors, as deltas do",
            where=where,
            path=directory / INDEX_NAME,
        )
