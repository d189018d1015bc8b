"""What tells a published version from another one that was published under the same number."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from gpusync.errors import StreamError, VersionMissingError, Where
from gpusync.stream.files import SourceFile
from gpusync.stream.header import read_header_bytes
from gpusync.stream.index import VersionIndex
from gpusync.stream.version import read_index
from gpusync.stream.versions import version_path


def read_identity(
    source_dir: str | os.PathLike[str],
    version: int,
    index: VersionIndex,
    *,
    read: Callable[[int], VersionIndex] | None = None,
    follow_links: bool = False,
) -> str | None:
    """A digest that differs if the version's weights do, for all that can be seen without reading them.

    The index alone will do where it names the trainer's run (`stream_id`). Without, two runs write the same index for
    other weights, and the headers of the shards are needed: they hold the checksums of what the version makes. Where
    nobody made checksums (a plain checkpoint), lengths and times of change stand in. A version that changes nothing
    says nothing itself: it is told by what it builds on.

    `read` reads the index of another version; one that remembers spares reading a long chain of such versions again
    and again.

    None where it cannot be told: a shard, or what an empty version builds on, is not there or is malformed. Raises
    SourceReadError.
    """
    if index.stream_id is not None:
        return index.digest
    digest = xxhash.xxh3_128(index.digest.encode())
    try:
        while index.is_delta and not index.weight_map and index.base_version:
            version = index.base_version
            index = read_index(source_dir, version, follow_links=follow_links) if read is None else read(version)
            digest.update(index.digest.encode())
        for name in dict.fromkeys(index.weight_map.values()):
            _add_shard(digest, version_path(source_dir, version) / name, index, follow_links=follow_links)
    except (StreamError, VersionMissingError):
        return None
    return digest.hexdigest()


def _add_shard(digest: xxhash.xxh3_128, path: Path, index: VersionIndex, *, follow_links: bool) -> None:
    where = Where(path=path, version=index.version)
    with SourceFile(path, follow_links=follow_links, where=where) as file:
        digest.update(read_header_bytes(file, where=where))
        if index.checksum_format is None:
            digest.update(repr((file.nbytes, file.mtime_ns)).encode())
