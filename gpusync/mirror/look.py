"""Looking at a stream for a local directory: plan, then read and validate every version that the plan needs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.errors import MirrorError, MissingLinkError, VersionMissingError, Where
from gpusync.mirror.local import LocalDirectory, checkpoint_identity, refuse_other_model
from gpusync.mirror.move import Move
from gpusync.plan import Applied, Link, Plan, plan_pull
from gpusync.stream import (
    Checkpoint,
    OpenFiles,
    PublishedVersion,
    VersionIndex,
    check_against,
    compare_duplicates,
    read_checkpoint,
    read_identity,
    read_index,
    read_version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where versions come from: the stream, and the engine's own checkpoint, which is version 0."""

    source_dir: Path
    base_dir: Path

    def read_base(self) -> Checkpoint:
        return read_checkpoint(self.base_dir, follow_links=True, where=Where(path=self.base_dir, version=0))


def look(sources: Sources, local: LocalDirectory, *, target: int, allow_rewind: bool = False) -> Move:
    """The move of `local` to `target`, ready to be carried out. Reads no payload, and no file stays open.

    Raises what `plan_pull`, `read_version`, `check_against` and `compare_duplicates` raise.
    """
    plan, indexes = plan_ahead(sources, local.applied, target=target, allow_rewind=allow_rewind)
    base = None
    if plan.reseeds:
        base = sources.read_base()
        plan = _spare_base(local, plan, base)
    start = _start_of(sources, local, plan, base)
    if plan.reseeds:
        refuse_other_model(local, start)
    versions = read_chain(sources, plan.chain, start)
    through = {version: indexes[version] for version in (*plan.chain, plan.seed_version) if version in indexes}
    return Move(plan=plan, start=start, versions=versions, indexes=through, base=base)


def plan_ahead(
    sources: Sources, applied: Applied, *, target: int, allow_rewind: bool = False
) -> tuple[Plan, dict[int, VersionIndex]]:
    """The plan from `applied` to `target`, and the index of every version that was looked up for it.

    The `digest` of an index is the version's identity here, as it is wherever a local directory remembers it.
    """
    indexes: dict[int, VersionIndex] = {}
    missing: dict[int, VersionMissingError] = {}

    @functools.cache
    def read(version: int) -> VersionIndex:
        return read_index(sources.source_dir, version)

    def lookup(version: int) -> Link | None:
        try:
            index = read(version)
        except VersionMissingError as error:
            missing[version] = error
            return None
        base = index.base_version if index.is_delta else None
        digest = read_identity(sources.source_dir, version, index, read=read)
        indexes[version] = index if digest is None else replace(index, digest=digest)
        return Link(version=version, base_version=base, digest=digest, stream_id=index.stream_id)

    try:
        return plan_pull(applied=applied, target=target, lookup=lookup, allow_rewind=allow_rewind), indexes
    except MissingLinkError:
        raise
    except VersionMissingError as error:
        raise missing[target] from error  # says which file of the target is missing


def read_chain(sources: Sources, chain: tuple[int, ...], start: Checkpoint) -> list[PublishedVersion]:
    """The versions of a chain, valid, and valid for the tensors of `start`."""
    versions = [read_published(sources, version) for version in chain]
    with OpenFiles() as files:
        for version in versions:
            check_against(version, start.tensors)
            compare_duplicates(version, files)
    return versions


def read_published(sources: Sources, version: int) -> PublishedVersion:
    """The version, valid, with its identity for the digest of its index. Errors as `read_version`."""
    found = read_version(sources.source_dir, version)
    digest = read_identity(sources.source_dir, version, found.index)
    return found if digest is None else replace(found, index=replace(found.index, digest=digest))


def as_checkpoint(full: PublishedVersion) -> Checkpoint:
    return Checkpoint(
        directory=full.path, tensors=full.tensors, headers=full.headers, index=full.index, follow_links=False
    )


def _spare_base(local: LocalDirectory, plan: Plan, base: Checkpoint) -> Plan:
    """Version 0 is not copied again over an untouched copy of the same base."""
    if plan.target != 0 or local.distrust is not None or local.state is None or local.state.version != 0:
        return plan
    if checkpoint_identity(base) != local.state.base_identity:
        return plan
    return Plan(target=0, seed="store", seed_version=0, chain=(), reason="already at the base")


def _start_of(sources: Sources, local: LocalDirectory, plan: Plan, base: Checkpoint | None) -> Checkpoint:
    if plan.seed == "full":
        return as_checkpoint(read_version(sources.source_dir, plan.seed_version))
    if plan.seed == "base" and base is not None:
        return base
    if local.checkpoint is None:
        raise MirrorError("the local checkpoint has a version but no tensors", path=local.path)
    return local.checkpoint
