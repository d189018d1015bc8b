"""Before anything is written: whether the version can be published, whether all ranks mean the same one, and the state
of the older version that it is made on, if it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpusync.errors import ChainError, LayoutError, PublishError, Where
from gpusync.publish.outcome import Settings, Target
from gpusync.publish.snapshot import Snapshot
from gpusync.publish.state import PublishedState
from gpusync.stream import INDEX_NAME, read_index

# What every rank must mean: the version, the checksum format, the stream.
Intent = tuple[Target, str, str]


def check_target(target: Target, snapshot: Snapshot, directory: Path, *, where: Where) -> None:
    """Raises PublishError for a version that cannot be published now."""
    if target.version <= target.newest:
        expected = f"above {target.newest}"
        raise PublishError("versions only go up", where=where, expected=expected, found=target.version)
    if not (target.is_full or snapshot.keeps or snapshot.names):
        raise PublishError("without base_dir there is nothing to make a delta against", where=where)
    # On every rank, because the next step removes files: never those of a published version.
    if os.path.lexists(directory / INDEX_NAME):
        raise PublishError("version is published already", where=where)


def check_intents(intents: Sequence[Intent], *, where: Where) -> None:
    """Raises PublishError, the same on every rank, where two ranks mean different things."""
    for rank, intent in enumerate(intents):
        if intent != intents[0]:
            raise PublishError(
                "ranks want to publish different things",
                where=where,
                expected=f"rank 0: {intents[0]}",
                found=f"rank {rank}: {intent}",
            )


def open_older(snapshot: Snapshot, target: Target, settings: Settings, *, where: Where) -> PublishedState | None:
    """The state of the target's base version; None where that is the newest one.

    Raises PublishError for a base that is not older than the newest version; ChainError, MissingLinkError or
    VersionMissingError for one that cannot be read back or belongs to another stream; LayoutError where its tensors are
    not those of the newest version, which only a full version can replace.
    """
    base = target.base_version
    if not target.is_shortcut:
        return None
    if base > target.newest:
        expected = f"at most {target.newest}"
        raise PublishError("the version to build on is not published", where=where, expected=expected, found=base)
    older = snapshot.branch(base)
    found = read_index(settings.source_dir, base).stream_id if base else None
    if found not in (None, settings.stream_id):
        raise ChainError(
            f"version {base}, to build on, is of another stream",
            where=where,
            expected=settings.stream_id,
            found=found,
        )
    _check_forms(snapshot, older, base, where)
    return older


def _check_forms(snapshot: Snapshot, older: PublishedState, base: int, where: Where) -> None:
    names = snapshot.names
    for name in sorted({*names, *older.names}):
        # A publisher that began without a base may not know of tensors that it was never offered.
        if older.form(name) != snapshot.form(name) and (name in names or snapshot.lacks(name)):
            raise LayoutError(
                f"tensor is not the same in version {base}, to build on: publish a full version instead",
                where=Where(path=where.path, version=where.version, tensor=name),
                expected=snapshot.form(name) or "no such tensor",
                found=older.form(name) or "no such tensor",
            )
