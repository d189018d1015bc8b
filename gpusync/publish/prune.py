"""Retention of a stream: plan what may go, make sure that what stays is sound, remove the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import VersionMissingError
from gpusync.plan import Link
from gpusync.publish.removal import is_half_removed, measure_version, remove_version
from gpusync.publish.retention import Reason, plan_prune
from gpusync.stream import list_versions, read_index, read_version, version_path


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """`kept` tells of every version that stays why; `removed` are those that went (or would, in a dry run), in that
    order; `finished` those of them that an earlier run had begun with. `left` names, by directory, what is not ours and
    kept the directory in place. `freed_bytes` counts shards and side files.
    """

    dry_run: bool
    kept: Mapping[int, Reason]
    removed: tuple[int, ...]
    finished: tuple[int, ...]
    freed_bytes: int
    left: Mapping[str, tuple[str, ...]]


def prune_stream(
    source_dir: str | os.PathLike[str], *, keep_last: int, keep_full_every: int = 0, dry_run: bool = False
) -> PruneReport:
    """Remove the versions that `plan_prune` lets go. Publishers and readers may be at work meanwhile.

    Before anything goes, every version that stays is read, as far as that is possible without decoding: an anchor that
    is not there in full carries nobody. What is not published is not looked at, but for what an interrupted run of this
    function left. After an error the same call may be repeated.

    Raises VersionMissingError where the stream or a part of a version that stays is not there, StreamError for a
    version that is wrong (nothing was removed then), PublishError for what cannot be removed.
    """
    source_dir = Path(source_dir)
    links, unpublished = _look(source_dir)
    plan = plan_prune(links, keep_last=keep_last, keep_full_every=keep_full_every)
    for version in plan.keep:
        read_version(source_dir, version)
    # Above the newest version a publisher may be at work; below it nobody is.
    newest = max(plan.keep, default=0)
    finished = tuple(v for v in reversed(unpublished) if v < newest and is_half_removed(source_dir, v))
    removed = tuple(sorted((*plan.remove, *finished), reverse=True))
    removals = {v: (measure_version if dry_run else remove_version)(source_dir, v) for v in removed}
    return PruneReport(
        dry_run=dry_run,
        kept=plan.keep,
        removed=removed,
        finished=finished,
        freed_bytes=sum(removal.nbytes for removal in removals.values()),
        left={str(version_path(source_dir, v)): removal.left for v, removal in removals.items() if removal.left},
    )


def _look(source_dir: Path) -> tuple[list[Link], list[int]]:
    """The links of all published versions, and the numbers of the directories that hold none."""
    links, unpublished = [], []
    for version in list_versions(source_dir):
        try:
            index = read_index(source_dir, version)
        except VersionMissingError:
            unpublished.append(version)
            continue
        base_version = index.base_version if index.is_delta else None
        links.append(Link(version=version, base_version=base_version, digest=index.digest, stream_id=index.stream_id))
    return links, unpublished
