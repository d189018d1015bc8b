"""The disk path: `pull()` brings a host-local checkpoint to a published version, as one transaction.

A drop-in for the receiver in slime's sglang patch. Everything is decided, decoded, verified and made durable beside
the files before the first byte of them changes; after that the move is finished whatever happens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.errors import DigestMismatchError, MirrorError, MissingLinkError, VersionMissingError, Where
from gpusync.hooks import Hook, load_hook, run_hook
from gpusync.mirror import io, state
from gpusync.mirror.local import (
    LocalDirectory,
    checkpoint_identity,
    examine_local_directory,
    open_local_directory,
    resolve_local_directory,
)
from gpusync.mirror.lock import local_lock
from gpusync.mirror.move import Move, carry_out
from gpusync.mirror.verify import find_damage
from gpusync.plan import Link, Plan, plan_pull
from gpusync.progress import Progress
from gpusync.report import PullReport, Stopwatch
from gpusync.stream import (
    Checkpoint,
    OpenFiles,
    VersionIndex,
    check_against,
    compare_duplicates,
    read_checkpoint,
    read_index,
    read_version,
    wait_until_visible,
)

LAST_REPORT_FILE = "last_report.json"
DEFAULT_LOCK_TIMEOUT_S = 600.0
MAX_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of one call, settled."""

    local: Path
    base_dir: Path
    source_dir: Path
    target: int
    hook: Hook | None
    visibility_timeout_s: float
    allow_rewind: bool
    copy_code: bool
    workers: int
    progress: Progress | None

    @property
    def control(self) -> Path:
        return self.local / state.CONTROL_DIRECTORY


def pull(
    *,
    local_checkpoint_dir: str | os.PathLike[str],
    base_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str],
    target_version: int,
    pre_read_hook: Hook | str | None = None,
    allow_rewind: bool = False,
    visibility_timeout: float = 0.0,
    lock_timeout: float = DEFAULT_LOCK_TIMEOUT_S,
    copy_code: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PullReport:
    """Bring `local_checkpoint_dir` to `target_version` of the stream in `source_dir`; 0 makes it the base.

    `base_dir` is the checkpoint the engine started from (version 0). `pre_read_hook(source_dir, target_version)`, a
    callable or an import path, makes published files visible on this host; it runs before the first look and before
    every further one. A version that is not there in full is waited for up to `visibility_timeout` seconds.
    `copy_code` lets `*.py` of a full version follow. `progress(done, total)` is told tensor bytes.

    Returns with the directory verified and durable at the target. On any GpusyncError its tensor files are what they
    were. Callers in other threads and processes of this host wait for the directory's lock up to `lock_timeout`
    seconds; those that ask for the same version get the report of the pull that brought it.
    """
    base, source = Path(base_dir), Path(source_dir)
    job = _Job(
        local=resolve_local_directory(
            Path(local_checkpoint_dir), apart_from={"base directory": base, "source directory": source}
        ),
        base_dir=base,
        source_dir=source,
        target=target_version,
        hook=load_hook(pre_read_hook, what="pre-read hook"),
        visibility_timeout_s=visibility_timeout,
        allow_rewind=allow_rewind,
        copy_code=copy_code,
        workers=workers or min(MAX_WORKERS, os.cpu_count() or 1),
        progress=progress,
    )
    watch = Stopwatch()
    with local_lock(job.control, timeout_s=lock_timeout):
        watch.lap("lock")
        local = open_local_directory(job.local, workers=job.workers)
        watch.lap("open")
        try:
            return _move(job, local, watch)
        except DigestMismatchError as error:
            damage = _find_own_fault(job, local, error)
            if damage is None:
                raise
            return _move(job, replace(local, distrust=damage), watch)


def plan(
    *,
    local_checkpoint_dir: str | os.PathLike[str],
    base_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str],
    target_version: int,
    allow_rewind: bool = False,
) -> Plan:
    """What `pull` would do now. Reads, validates as `pull` does before it decodes, and changes nothing."""
    job = _Job(
        local=Path(local_checkpoint_dir).resolve(),
        base_dir=Path(base_dir),
        source_dir=Path(source_dir),
        target=target_version,
        hook=None,
        visibility_timeout_s=0.0,
        allow_rewind=allow_rewind,
        copy_code=False,
        workers=1,
        progress=None,
    )
    local = examine_local_directory(job.local, known=state.read_state(job.control), workers=1)
    found = _look(job, local).plan
    return found if local.distrust is None else replace(found, reason=local.distrust)


def _move(job: _Job, local: LocalDirectory, watch: Stopwatch) -> PullReport:
    """Plan, validate, prepare, commit. Nothing that is prepared survives an error."""
    move = wait_until_visible(
        lambda: _look(job, local),
        refresh=lambda: _refresh(job),
        timeout_s=job.visibility_timeout_s if job.target > 0 else 0.0,
    )
    watch.lap("validate")
    if move.plan.is_nothing:
        return _report_nothing(job, move.plan, watch)
    report = carry_out(local, move, workers=job.workers, watch=watch, copy_code=job.copy_code, progress=job.progress)
    io.write_durably(job.control / LAST_REPORT_FILE, report.as_json().encode())
    return report


def _refresh(job: _Job) -> None:
    if job.target > 0:
        where = Where(path=job.source_dir, version=job.target)
        run_hook(job.hook, os.fspath(job.source_dir), job.target, what="the pre-read hook", where=where)


def _look(job: _Job, local: LocalDirectory) -> Move:
    """Plan, then read and validate every version that the plan needs. No file stays open."""
    indexes: dict[int, VersionIndex] = {}
    missing: dict[int, VersionMissingError] = {}

    def lookup(version: int) -> Link | None:
        try:
            index = indexes[version] = read_index(job.source_dir, version)
        except VersionMissingError as error:
            missing[version] = error
            return None
        base = index.base_version if index.is_delta else None
        return Link(version=version, base_version=base, digest=index.digest, stream_id=index.stream_id)

    try:
        plan = plan_pull(applied=local.applied, target=job.target, lookup=lookup, allow_rewind=job.allow_rewind)
    except MissingLinkError:
        raise
    except VersionMissingError as error:
        raise missing[job.target] from error  # says which file of the target is missing
    base = None
    if plan.reseeds:
        base = read_checkpoint(job.base_dir, follow_links=True, where=Where(path=job.base_dir, version=0))
        plan = _spare_base(local, plan, base)
    start = _start_of(job, local, plan, base)
    versions = [read_version(job.source_dir, version) for version in plan.chain]
    with OpenFiles() as files:
        for version in versions:
            check_against(version, start.tensors)
            compare_duplicates(version, files)
    through = {version: indexes[version] for version in (*plan.chain, plan.seed_version) if version in indexes}
    return Move(plan=plan, start=start, versions=versions, indexes=through, base=base)


def _spare_base(local: LocalDirectory, plan: Plan, base: Checkpoint) -> Plan:
    """Version 0 is not copied again over an untouched copy of the same base."""
    if plan.target != 0 or local.distrust is not None or local.state is None or local.state.version != 0:
        return plan
    if checkpoint_identity(base) != local.state.base_identity:
        return plan
    return Plan(target=0, seed="store", seed_version=0, chain=(), reason="already at the base")


def _start_of(job: _Job, local: LocalDirectory, plan: Plan, base: Checkpoint | None) -> Checkpoint:
    if plan.seed == "full":
        full = read_version(job.source_dir, plan.seed_version)
        return Checkpoint(
            directory=full.path, tensors=full.tensors, headers=full.headers, index=full.index, follow_links=False
        )
    if plan.seed == "base" and base is not None:
        return base
    if local.checkpoint is None:
        raise MirrorError("the local checkpoint has a version but no tensors", path=job.local)
    return local.checkpoint


def _find_own_fault(job: _Job, local: LocalDirectory, error: DigestMismatchError) -> str | None:
    """After a digest mismatch: the local tensor's damage, if it was that and not the stream that is wrong."""
    checkpoint, tensor = local.checkpoint, error.tensor
    if local.distrust is not None or checkpoint is None or tensor not in checkpoint.tensors:
        return None
    checksums = state.read_checksums(job.control)
    if tensor not in checksums:
        return None
    with OpenFiles() as files:
        return find_damage(checkpoint, [checkpoint.tensors[tensor]], checksums, files=files, workers=1)


def _report_nothing(job: _Job, plan: Plan, watch: Stopwatch) -> PullReport:
    """At the target already: the report of the pull that brought the directory there, if it is still known."""
    try:
        last = PullReport.from_json((job.control / LAST_REPORT_FILE).read_text())
        if last.target_version == plan.target:
            return replace(last, shared=True)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return PullReport(
        target_version=plan.target,
        version_before=plan.target,
        seed=plan.seed,
        seed_version=plan.seed_version,
        chain=plan.chain,
        reason=plan.reason,
        seconds=watch.seconds,
    )
