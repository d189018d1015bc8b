"""One move of a local directory from what it holds to a version: prepare everything, let the journal decide, finish.

What to move to, and from where, is planned and validated by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.errors import MirrorError
from gpusync.mirror import journal
from gpusync.mirror.change import TensorChange, pending_changes
from gpusync.mirror.fold import own_files, prepare_fold
from gpusync.mirror.journal import INCOMING_DIRECTORY, Journal
from gpusync.mirror.local import LocalDirectory, checkpoint_identity
from gpusync.mirror.seed import find_side_files, prepare_seed
from gpusync.mirror.state import MirrorState
from gpusync.plan import Plan
from gpusync.progress import Progress, counter
from gpusync.report import PullReport, Stopwatch
from gpusync.stream import Checkpoint, OpenFiles, PublishedVersion, VersionIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A plan and what it needs, read and validated.

    `start` is the checkpoint that `versions` (deltas, ascending) are applied to; `indexes` those of the versions that
    the plan goes through. `base` is the engine's own checkpoint, for side files and to recognise it again; a plan that
    continues the store needs none.
    """

    plan: Plan
    start: Checkpoint
    versions: Sequence[PublishedVersion]
    indexes: Mapping[int, VersionIndex]
    base: Checkpoint | None = None

    @property
    def changes(self) -> dict[str, TensorChange]:
        return pending_changes(self.start.tensors, self.versions)


def carry_out(
    local: LocalDirectory,
    move: Move,
    *,
    workers: int,
    watch: Stopwatch,
    copy_code: bool = False,
    progress: Progress | None = None,
) -> PullReport:
    """Make the move; its lock must be held. Nothing that was prepared survives an error before the decision.

    `copy_code` lets `*.py` of a full version follow. Adds the laps "prepare" and "commit" to `watch`.
    """
    try:
        with OpenFiles() as sources:
            if move.plan.reseeds:
                decided, report = _prepare_seed(local, move, sources, workers, copy_code, progress)
            else:
                decided, report = _prepare_fold(local, move, sources, workers, progress)
        watch.lap("prepare")
        journal.commit(local.path, decided)
    except BaseException:
        with suppress(MirrorError):  # what cannot be dropped now is dropped at the next open
            journal.discard(local.path)
        raise
    journal.finish(local.path, decided, workers=workers)
    watch.lap("commit")
    return replace(report, seconds=watch.seconds)


def _prepare_fold(
    local: LocalDirectory, move: Move, sources: OpenFiles, workers: int, progress: Progress | None
) -> tuple[Journal, PullReport]:
    changes = move.changes
    prepared = prepare_fold(
        move.start,
        changes,
        control=local.control,
        sources=sources,
        workers=workers,
        progress=counter(progress, sum(change.base.nbytes for change in changes.values())),
    )
    own_files(local.path, prepared.files, control=local.control)
    decided = Journal(
        state=_state_after(local, move),
        managed=local.managed,
        checksums=prepared.checksums,
        files=prepared.files,
        spools=prepared.spools,
    )
    spool_bytes = sum(prepared.spools.values())
    report = replace(_report(local, move, changes), elements_changed=prepared.elements_changed, spool_bytes=spool_bytes)
    return decided, report


def _prepare_seed(
    local: LocalDirectory,
    move: Move,
    sources: OpenFiles,
    workers: int,
    copy_code: bool,
    progress: Progress | None,
) -> tuple[Journal, PullReport]:
    changes = move.changes
    whole = sum(tensor.nbytes for tensor in move.start.tensors.values())
    prepared = prepare_seed(
        move.start,
        changes,
        into=local.control / INCOMING_DIRECTORY,
        side_files=side_files_of(move.start, base=move.base, is_base=move.plan.seed == "base", copy_code=copy_code),
        sources=sources,
        workers=workers,
        progress=counter(progress, whole),
    )
    decided = Journal(
        state=_state_after(local, move),
        managed=prepared.install,
        checksums=prepared.checksums,
        install=prepared.install,
        remove=tuple(name for name in local.managed if name not in prepared.install),
    )
    report = replace(
        _report(local, move, changes),
        elements_changed=None,
        tensor_bytes=whole,
        unverified_tensors=prepared.unverified_tensors,
    )
    return decided, report


def side_files_of(start: Checkpoint, *, base: Checkpoint | None, is_base: bool, copy_code: bool) -> dict[str, Path]:
    """Side files of a checkpoint that `start` seeds: the base's own, code included, overlaid by a full version's."""
    found = {} if base is None else find_side_files(base.directory, with_code=True, follow_links=True)
    if not is_base:
        found |= find_side_files(start.directory, with_code=copy_code, follow_links=False)
    return found


def _state_after(local: LocalDirectory, move: Move) -> MirrorState:
    """The state once the plan is carried out. A reseed forgets the stream it came from."""
    digests = {version: index.digest for version, index in move.indexes.items()}
    newest = move.indexes.get(move.plan.target)
    before = None if move.plan.reseeds else local.state
    stream_id = None if newest is None else newest.stream_id
    if before is None:
        return MirrorState(
            version=move.plan.target,
            stream_id=stream_id,
            index_digests=digests,
            base_identity=None if move.base is None else checkpoint_identity(move.base),
        )
    return MirrorState(
        version=move.plan.target,
        stream_id=stream_id or before.stream_id,
        index_digests={**before.index_digests, **digests},
        base_identity=before.base_identity,
    )


def _report(local: LocalDirectory, move: Move, changes: Mapping[str, TensorChange]) -> PullReport:
    wire = sum(payload.nbytes for version in move.versions for payload in version.tensors.values())
    if move.plan.seed == "full":
        wire += sum(tensor.nbytes for tensor in move.start.tensors.values())
    return PullReport(
        target_version=move.plan.target,
        version_before=local.applied.version,
        seed=move.plan.seed,
        seed_version=move.plan.seed_version,
        chain=move.plan.chain,
        reason=move.plan.reason if local.distrust is None else local.distrust,
        tensors_changed=len(changes),
        tensor_bytes=sum(change.base.nbytes for change in changes.values()),
        wire_bytes=wire,
    )
