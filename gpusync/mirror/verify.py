"""Comparing a checkpoint's tensors with the checksums that are known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gpusync.digest import new_digest
from gpusync.mirror.state import Checksum
from gpusync.mirror.workers import for_each
from gpusync.stream import Checkpoint, OpenFiles, StoredTensor

WINDOW_BYTES = 2**20


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
