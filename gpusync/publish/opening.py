"""Before anything is visible: whether the version can be published, whether all ranks mean the same one and readers
have its tensors; and the state of the older version that it is made on, if it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from gpusync.errors import ChainError, LayoutError, PublishError, Where
from gpusync.publish.outcome import Settings, Target
from gpusync.publish.snapshot import Snapshot
from gpusync.publish.state import PublishedState
from gpusync.stream import INDEX_NAME, read_index

# So many names of tensors left out are told.
_NAMES_TOLD = 10

# What every rank must mean: the version, the checksum format, the stream.
Intent = tuple[Target, str, str]


def check_target(target: Target, snapshot: Snapshot, directory: Path, *, where: Where) -> None:
    """Raises PublishError for a version that cannot be published now."""
    if target.version <= target.newest:
        expected = f"above {target.newest}"
        raise PublishError("versions only go up", where=where, expected=expected, found=target.version)
    if not (target.is_full or snapshot.is_known):
        raise PublishError(
            "what the readers hold is not known: a delta needs base_dir, or a full version before it (publish_full)",
            where=where,
        )
    # On every rank, because the next step removes files: never those of a published version.
    if os.path.lexists(directory / INDEX_NAME):
        raise PublishError("version is published already, resume=True continues the stream", where=where)


def check_names(offered: Iterable[Collection[str]], target: Target, snapshot: Snapshot, *, where: Where) -> None:
    """`offered` are the names by rank. Raises PublishError, the same on every rank, if a delta's are all unknown to the
    readers: a prefix too many, or another model.
    """
    names = sorted(set().union(*offered))
    if names and not target.is_full and all(map(snapshot.lacks, names)):
        raise PublishError(
            "no tensor offered is in the readers' checkpoint: a delta cannot add tensors, publish_full can",
            where=Where(path=where.path, version=where.version, tensor=names[0]),
            expected=f"tensors such as `{min(snapshot.names, default='')}`",
            found=f"{len(names)} others",
        )


def tell_unknown(names: Sequence[str], *, offered: int) -> str:
    """The warning for tensors that a delta leaves out because the readers' checkpoint does not have them."""
    told = ", ".join(f"`{name}`" for name in names[:_NAMES_TOLD])
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return (
        f"NOT PUBLISHED: {len(names)} of {offered} tensors offered are not in the readers' checkpoint, which a delta "
        f"cannot add to (publish_full can); the values given are taken for the old ones: {told}{more}"
    )


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
    for name in sorted({*snapshot.names, *older.names}):
        if older.form(name) != snapshot.form(name):
            raise LayoutError(
                f"tensor is not the same in version {base}, to build on: publish a full version instead",
                where=Where(path=where.path, version=where.version, tensor=name),
                expected=snapshot.form(name) or "no such tensor",
                found=older.form(name) or "no such tensor",
            )
