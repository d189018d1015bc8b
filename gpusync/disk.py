"""The disk path: `pull()` brings a host-local checkpoint to a published version, as one transaction.

A drop-in for the receiver in slime's sglang patch. Everything is decided, decoded, verified and made durable beside
the files before the first byte of them changes; after that the move is finished whatever happens.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.errors import DigestMismatchError, MirrorError, StreamError, VersionMissingError, Where
from gpusync.hooks import Hook, load_hook, run_hook
from gpusync.mirror import io, state
from gpusync.mirror.inbox import drop_pending
from gpusync.mirror.local import (
    LocalDirectory,
    examine_local_directory,
    find_own_fault,
    open_local_directory,
    resolve_local_directory,
)
from gpusync.mirror.lock import local_lock
from gpusync.mirror.look import Sources, look
from gpusync.mirror.move import carry_out
from gpusync.mirror.pending import fold_pending, wait_for_holders
from gpusync.plan import Plan
from gpusync.progress import Progress
from gpusync.report import PullReport, Stopwatch
from gpusync.stream import wait_until_visible

LOG = logging.getLogger(__name__)
LAST_REPORT_FILE = "last_report.json"
DEFAULT_LOCK_TIMEOUT_S = 600.0
MAX_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of one call, settled."""

    local: Path
    sources: Sources
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
    were, but for a MirrorError from a disk that fails after the move was decided: then the directory says no version
    until the next pull, which completes the move whatever its own target. Callers in other threads and processes of
    this host wait for the directory's lock up to `lock_timeout` seconds; those that ask for the same version get the
    report of the pull that brought it.
    """
    base, source = Path(base_dir), Path(source_dir)
    job = _Job(
        local=resolve_local_directory(
            Path(local_checkpoint_dir), apart_from={"base directory": base, "source directory": source}
        ),
        sources=Sources(source_dir=source, base_dir=base),
        target=target_version,
        hook=load_hook(pre_read_hook, what="pre-read hook"),
        visibility_timeout_s=visibility_timeout,
        allow_rewind=allow_rewind,
        copy_code=copy_code,
        workers=workers or min(MAX_WORKERS, os.cpu_count() or 1),
        progress=progress,
    )
    watch = Stopwatch()
    with io.explained("the pull failed", job.local), local_lock(job.control, timeout_s=lock_timeout):
        watch.lap("lock")
        wait_for_holders(job.local, timeout_s=lock_timeout)
        local = open_local_directory(job.local, workers=job.workers)
        local = _settle(job, local)
        watch.lap("open")
        try:
            return _move(job, local, watch)
        except DigestMismatchError as error:
            damage = find_own_fault(local, error)
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
    path = Path(local_checkpoint_dir).resolve()
    local = examine_local_directory(path, known=state.read_state(path / state.CONTROL_DIRECTORY), workers=1)
    sources = Sources(source_dir=Path(source_dir), base_dir=Path(base_dir))
    found = look(sources, local, target=target_version, allow_rewind=allow_rewind).plan
    return found if local.distrust is None else replace(found, reason=local.distrust)


def _settle(job: _Job, local: LocalDirectory) -> LocalDirectory:
    """The directory once everything accepted is in its files; what was accepted and is wrong was dropped."""
    try:
        return fold_pending(local, sources=job.sources, workers=job.workers)
    except (StreamError, DigestMismatchError, VersionMissingError) as error:
        LOG.warning("accepted versions of %s were wrong, and are dropped: %s", job.local, error)
        return open_local_directory(job.local, workers=job.workers)


def _move(job: _Job, local: LocalDirectory, watch: Stopwatch) -> PullReport:
    """Plan, validate, prepare, commit."""
    move = wait_until_visible(
        lambda: look(job.sources, local, target=job.target, allow_rewind=job.allow_rewind),
        refresh=lambda: _refresh(job),
        timeout_s=job.visibility_timeout_s if job.target > 0 else 0.0,
    )
    watch.lap("validate")
    if move.plan.is_nothing:
        return _report_nothing(job, move.plan, watch)
    report = carry_out(local, move, workers=job.workers, watch=watch, copy_code=job.copy_code, progress=job.progress)
    # What a mirror has accepted meanwhile is passed by, or, after a reseed, built on what is no longer there.
    drop_pending(job.control, up_to=sys.maxsize if move.plan.reseeds else report.target_version)
    with suppress(MirrorError):  # those who share it do without: the move itself is done and durable
        io.write_durably(job.control / LAST_REPORT_FILE, report.as_json().encode())
    return report


def _refresh(job: _Job) -> None:
    if job.target > 0:
        source_dir = job.sources.source_dir
        where = Where(path=source_dir, version=job.target)
        run_hook(job.hook, os.fspath(source_dir), job.target, what="the pre-read hook", where=where)


def _report_nothing(job: _Job, plan: Plan, watch: Stopwatch) -> PullReport:
    """At the target already: the report of the pull that brought the directory there, if it is still known."""
    try:
        last = PullReport.from_json((job.control / LAST_REPORT_FILE).read_text())
        if last.target_version == plan.target:
            return replace(last, shared=True)
    except (OSError, *state.DAMAGE):
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
