"""A local checkpoint directory as it is found: recovered, checked, and trusted or not.

Nothing here decides what to pull. It answers which version the tensor files hold, and if none that can be relied on,
why not, in one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from gpusync.errors import DigestMismatchError, GpusyncError, MirrorError, SourceReadError, Where
from gpusync.mirror import io, journal, state
from gpusync.mirror.state import MirrorState
from gpusync.mirror.verify import find_damage
from gpusync.plan import Applied
from gpusync.stream import INDEX_NAME, Checkpoint, OpenFiles, filesystem_type, is_local, read_checkpoint
from gpusync.stream.filesystem import UNKNOWN_TYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDirectory:
    """What stands in a local directory.

    `state` and `checkpoint` are both there when the tensor files hold version `state.version`; otherwise `distrust`
    says why nothing can be built on them (`checkpoint` may still be there, to be replaced). `is_ours`: we, or slime's
    receiver, have brought this directory to a version before.
    """

    path: Path
    state: MirrorState | None
    checkpoint: Checkpoint | None
    distrust: str | None
    is_ours: bool

    @property
    def control(self) -> Path:
        return self.path / state.CONTROL_DIRECTORY

    @property
    def applied(self) -> Applied:
        """For the planner. Nothing is applied when the files cannot be trusted."""
        if self.distrust is not None or self.state is None:
            return Applied()
        return Applied(
            version=self.state.version, stream_id=self.state.stream_id, digests=dict(self.state.index_digests)
        )

    @property
    def managed(self) -> tuple[str, ...]:
        """Names of the files that are ours to replace and to remove."""
        if self.state is not None and self.state.files is not None:
            return tuple(self.state.files)
        if self.checkpoint is None:
            return ()
        index = (INDEX_NAME,) if (self.path / INDEX_NAME).exists() else ()
        return (*self.checkpoint.headers, *index)


def resolve_local_directory(path: Path, *, apart_from: dict[str, Path]) -> Path:
    """The real path of a local checkpoint directory, made when missing.

    MirrorError when it lies on a network or FUSE filesystem (in-place writes and fsync mean little there), or when it
    is, contains, or lies in one of the directories `apart_from` (role to path), which must not be written to.
    """
    with io.explained("cannot look at the local checkpoint directory", path):
        return _resolve(path, apart_from)


def _resolve(path: Path, apart_from: dict[str, Path]) -> Path:
    local = path.resolve()
    for role, other in apart_from.items():
        real = other.resolve()
        if local == real or local in real.parents or real in local.parents:
            raise MirrorError(f"the local checkpoint directory and the {role} overlap", path=local, found=real)
    kind = filesystem_type(local)
    if not is_local(kind) and kind != UNKNOWN_TYPE:
        raise MirrorError(
            "the local checkpoint directory must be on a local filesystem",
            path=local,
            expected="ext4, xfs, tmpfs ...",
            found=kind,
        )
    if local.exists() and not local.is_dir():
        raise MirrorError("the local checkpoint directory is not a directory", path=local)
    return local


def open_local_directory(path: Path, *, workers: int) -> LocalDirectory:
    """Recover and examine the directory. Its lock must be held.

    MirrorError when it holds files but neither our state nor a checkpoint: those are somebody else's.
    """
    recovered = journal.recover(path, workers=workers)
    known = recovered or state.read_state(path / state.CONTROL_DIRECTORY)
    return examine_local_directory(path, known=known, workers=workers)


def examine_local_directory(path: Path, *, known: MirrorState | None, workers: int) -> LocalDirectory:
    """What stands in the directory, whose state says `known`. Reads only. Errors as `open_local_directory`."""
    control = path / state.CONTROL_DIRECTORY
    is_ours = known is not None or any(io.exists(control / name) for name in (state.STATE_FILE, state.CHECKSUMS_FILE))
    files = _files_in(path)
    checkpoint, problem = _read_checkpoint(path)
    if problem is not None and not is_ours and files:
        _refuse_foreign_files(path, files)
    if not files:
        problem = "the local directory is empty"
    if problem is None and known is None:
        problem = "the local checkpoint has no state: its version is unknown"
    if problem is None and known is not None and checkpoint is not None:
        problem = _why_changed(known, checkpoint, workers=workers)
    return LocalDirectory(path=path, state=known, checkpoint=checkpoint, distrust=problem, is_ours=is_ours)


def read_local_version(path: Path) -> tuple[Applied, Checkpoint] | None:
    """What the tensor files hold and where it came from, for one who only reads; None when that is not known now."""
    known = state.read_state(path / state.CONTROL_DIRECTORY)
    checkpoint, problem = _read_checkpoint(path)
    if known is None or checkpoint is None or problem is not None:
        return None
    return Applied(version=known.version, stream_id=known.stream_id, digests=dict(known.index_digests)), checkpoint


def find_own_fault(local: LocalDirectory, error: DigestMismatchError) -> str | None:
    """After a digest mismatch: the damage of the local tensor, if it was that and not the stream that is wrong."""
    checkpoint, tensor = local.checkpoint, error.tensor
    if local.distrust is not None or checkpoint is None or tensor is None or tensor not in checkpoint.tensors:
        return None
    checksums = state.read_checksums(local.control)
    if tensor not in checksums:
        return None
    with OpenFiles() as files:
        return find_damage(checkpoint, [checkpoint.tensors[tensor]], checksums, files=files, workers=1)


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Tells base checkpoints apart without reading weights: by names, lengths, layouts and times of change."""
    digest = xxhash.xxh3_128()
    for name in sorted(checkpoint.headers):
        found = (checkpoint.directory / name).stat()
        digest.update(repr((name, found.st_size, found.st_mtime_ns)).encode())
    for tensor in sorted(checkpoint.tensors):
        stored = checkpoint.tensors[tensor]
        digest.update(repr((tensor, stored.dtype, stored.shape, stored.file, stored.offset)).encode())
    return digest.hexdigest()


def _files_in(path: Path) -> list[str]:
    if not io.exists(path):
        return []
    with io.explained("cannot list", path):
        return sorted(entry.name for entry in path.iterdir() if entry.name != state.CONTROL_DIRECTORY)


def _read_checkpoint(path: Path) -> tuple[Checkpoint | None, str | None]:
    try:
        return read_checkpoint(path, follow_links=True, where=Where(path=path)), None
    except SourceReadError:
        raise  # it says nothing about the files
    except GpusyncError as error:
        return None, f"the local checkpoint cannot be used: {error}"


def _refuse_foreign_files(path: Path, foreign: list[str]) -> None:
    raise MirrorError(
        "the local checkpoint directory holds files that are neither ours nor a checkpoint that can be read",
        path=path,
        expected="an empty directory, one of ours, or a checkpoint of the same model",
        found=", ".join(foreign[:5]) + (" ..." if len(foreign) > 5 else ""),
    )


def refuse_other_model(local: LocalDirectory, start: Checkpoint) -> None:
    """A checkpoint that we did not put there may be replaced only by one of the same model: `start` has its tensors.

    Raises MirrorError, naming the first tensor that differs, for any other: it is somebody else's.
    """
    if local.is_ours or local.checkpoint is None:
        return
    theirs, ours = local.checkpoint.tensors, start.tensors
    for name in dict.fromkeys((*theirs, *ours)):
        forms = [
            f"{found.dtype}{list(found.shape)}" if found is not None else "no such tensor"
            for found in (ours.get(name), theirs.get(name))
        ]
        if forms[0] != forms[1]:
            raise MirrorError(
                "the local directory holds a checkpoint of another model, which is not ours to replace",
                path=local.path,
                tensor=name,
                expected=forms[0],
                found=forms[1],
            )


def _why_changed(known: MirrorState, checkpoint: Checkpoint, *, workers: int) -> str | None:
    """Why the files are not what we left behind, or None. A touched file is read and compared with its checksums."""
    if known.files is None:
        return None
    missing = [name for name in known.files if not (checkpoint.directory / name).is_file()]
    unmanaged = [name for name in checkpoint.headers if name not in known.files]
    if missing or unmanaged:
        return f"the local checkpoint's files were changed: {', '.join((missing + unmanaged)[:5])}"
    touched = {
        name
        for name, mark in known.files.items()
        if name in checkpoint.headers and journal.mark_file(checkpoint.directory / name) != mark
    }
    if not touched:
        return None
    checksums = state.read_checksums(checkpoint.directory / state.CONTROL_DIRECTORY)
    with OpenFiles() as files:
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file in touched]
        damage = find_damage(checkpoint, tensors, checksums, files=files, workers=workers)
    return None if damage is None else f"the local checkpoint was changed by someone else: {damage}"
