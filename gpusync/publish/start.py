"""Where a publisher begins: at which version, and in which stream."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from gpusync.errors import PublishError, VersionMissingError
from gpusync.stream import VersionIndex, list_versions, read_index, version_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """`version` is the one to build on. `resumes`: it was found in the stream, and its state has to be rebuilt."""

    version: int
    stream_id: str
    resumes: bool


def choose_start(
    source_dir: str | os.PathLike[str], *, stream_id: str | None, resume: bool, base_version: int
) -> Start:
    """To `resume` is to go on after the newest published version. Otherwise the start is `base_version`, in its stream
    if it is a published version, else in a new one.

    Raises PublishError if `stream_id` names another stream than the one that goes on, StreamError for a version that is
    damaged.
    """
    goes_on = find_newest(source_dir) if resume else _find(source_dir, base_version)
    if goes_on is None:
        return Start(version=base_version, stream_id=stream_id or str(uuid.uuid4()), resumes=False)
    version, index = goes_on
    if stream_id is not None and index.stream_id not in (None, stream_id):
        raise PublishError(
            "the version to go on from belongs to another stream",
            path=version_path(source_dir, version),
            version=version,
            expected=stream_id,
            found=index.stream_id,
        )
    # slime's versions carry no stream_id; the versions that follow them may have any.
    return Start(version=version, stream_id=index.stream_id or stream_id or str(uuid.uuid4()), resumes=resume)


def find_newest(source_dir: str | os.PathLike[str]) -> tuple[int, VersionIndex] | None:
    """The newest published version; what has no index, left by an attempt that died, is passed over."""
    try:
        versions = list_versions(source_dir)
    except VersionMissingError:
        return None
    return next((found for version in reversed(versions) if (found := _find(source_dir, version)) is not None), None)


def _find(source_dir: str | os.PathLike[str], version: int) -> tuple[int, VersionIndex] | None:
    try:
        return version, read_index(source_dir, version)
    except VersionMissingError:
        return None
