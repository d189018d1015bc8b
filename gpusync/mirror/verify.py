"""Comparing a checkpoint's tensors with the checksums that are known of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpusync.digest import new_digest
from gpusync.errors import MirrorError
from gpusync.mirror import state
from gpusync.mirror.state import Checksum
from gpusync.mirror.workers import for_each
from gpusync.progress import Progress, counter
from gpusync.stream import Checkpoint, OpenFiles, StoredTensor, read_checkpoint

WINDOW_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify_directory` found. `damage` describes the first tensor that is wrong; None when all are right."""

    version: int
    tensors: int
    nbytes: int
    damage: str | None


def verify_directory(
    directory: str | os.PathLike[str], *, workers: int | None = None, progress: Progress | None = None
) -> Verification:
    """Compare every tensor of a local checkpoint with its newest checksum, as `.weight_sync` tells it.

    Reads only. Raises MirrorError when the directory says no version (an unfinished move: the next pull completes it),
    or when its version changed meanwhile; StreamError or VersionMissingError when its files are no checkpoint.
    """
    directory = Path(directory)
    control = directory / state.CONTROL_DIRECTORY
    known = state.read_state(control)
    if known is None:
        raise MirrorError("the local checkpoint has no state: its version is unknown", path=control / state.STATE_FILE)
    checkpoint = read_checkpoint(directory, follow_links=True)
    tensors = list(checkpoint.tensors.values())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with OpenFiles() as files:
        damage = find_damage(
            checkpoint,
            tensors,
            state.read_checksums(control),
            files=files,
            workers=workers or os.cpu_count() or 1,
            progress=counter(progress, nbytes),
        )
    now = state.read_state(control)
    if now is None or now.version != known.version:
        raise MirrorError("the local checkpoint moved on while it was verified", path=directory)
    return Verification(version=known.version, tensors=len(tensors), nbytes=nbytes, damage=damage)


def digest_tensor(checkpoint: Checkpoint, tensor: StoredTensor, algorithm: str, *, files: OpenFiles) -> str:
    """The digest of a tensor's bytes as they are on disk now, by windows of 1 MiB."""
    digest = new_digest(algorithm)
    window = np.empty(min(WINDOW_BYTES, tensor.nbytes), np.uint8)
    with checkpoint.open_tensor(tensor.name, files) as source:
        for offset in range(0, tensor.nbytes, WINDOW_BYTES):
            part = window[: min(WINDOW_BYTES, tensor.nbytes - offset)]
            source.read_into(offset, part)
            digest.update(part)
    return digest.hexdigest()


def find_damage(
    checkpoint: Checkpoint,
    tensors: Sequence[StoredTensor],
    checksums: Mapping[str, Checksum],
    *,
    files: OpenFiles,
    workers: int,
    progress: Callable[[int], None] = lambda _: None,
) -> str | None:
    """The first tensor found whose bytes are not what its checksum says, described; None when there is none.

    A tensor without a known checksum counts as damaged: its bytes cannot be relied on. `progress` is told the bytes of
    each tensor that was compared.
    """
    damage: list[str] = []

    def compare(_: int, tensor: StoredTensor) -> None:
        if damage:
            return
        known = checksums.get(tensor.name)
        if known is None:
            damage.append(f"tensor `{tensor.name}` in {tensor.file} has no known checksum")
            return
        found = digest_tensor(checkpoint, tensor, known.algorithm, files=files)
        if found != known.value:
            damage.append(
                f"tensor `{tensor.name}` in {tensor.file}: expected {known.algorithm} {known.value}, found {found}"
            )
        progress(tensor.nbytes)

    for_each(tensors, compare, workers=workers, size=lambda tensor: tensor.nbytes)
    return damage[0] if damage else None
