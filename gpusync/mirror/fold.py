"""Folding deltas into the tensor files of a local checkpoint: verify everything into redo spools, then let the journal
scatter it. Not one byte of a managed file changes before every tensor's digest has matched."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpusync.errors import Where
from gpusync.mirror import io
from gpusync.mirror.change import Bytes, TensorChange, apply_change
from gpusync.mirror.journal import REDO_DIRECTORY
from gpusync.mirror.redo import RedoWriter
from gpusync.mirror.state import Checksum
from gpusync.mirror.workers import for_each
from gpusync.stream import Checkpoint, OpenFiles, element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Verified and spooled, not yet decided. `files` is what spool records count in; `spools` maps name to length."""

    files: tuple[str, ...]
    spools: Mapping[str, int]
    checksums: Mapping[str, Checksum]
    elements_changed: int
    tensors_changed: int


def prepare_fold(
    checkpoint: Checkpoint,
    changes: Mapping[str, TensorChange],
    *,
    control: Path,
    sources: OpenFiles,
    workers: int,
    progress: Callable[[int], None],
) -> Fold:
    """Bring `changes` to their new state on scratch and spool the verified new values under `control`/redo.

    Memory stays within a few windows a worker, whatever the tensors' sizes. `progress` is told the bytes of each
    tensor done. The spools are synced when this returns; nothing else was written.
    """
    redo = control / REDO_DIRECTORY
    io.make_directory(redo)
    names = tuple(sorted({change.base.file for change in changes.values()}))
    numbers = {name: number for number, name in enumerate(names)}
    checksums: dict[str, Checksum] = {}
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(RedoWriter(redo / f"{n:03d}.spool"))) for n in range(workers)]

        def spool(worker: int, change: TensorChange) -> None:
            tensor, writer = change.base, writers[worker]
            file, width = numbers[tensor.file], element_bytes(tensor.dtype)

            def keep(offset: int, old: Bytes, new: Bytes) -> None:
                writer.add(file=file, offset=tensor.offset + offset, old=old, new=new, element_bytes=width)

            with checkpoint.open_tensor(tensor.name, sources) as base:
                where = Where(path=checkpoint.directory / tensor.file, tensor=tensor.name)
                checksums[tensor.name] = apply_change(change, base=base, sources=sources, sink=keep, where=where)
            progress(tensor.nbytes)

        for_each(changes.values(), spool, workers=workers, size=lambda change: change.base.nbytes)
        spools = {writer.path.name: writer.finish() for writer in writers}
    io.fsync_directory(redo)
    return Fold(
        files=names,
        spools={name: nbytes for name, nbytes in spools.items() if nbytes},
        checksums=checksums,
        elements_changed=sum(writer.elements_changed for writer in writers),
        tensors_changed=len(changes),
    )


def own_files(directory: Path, names: tuple[str, ...], *, control: Path) -> None:
    """Make each file a regular file of ours alone before it is written in place.

    A symlink, or a hard link to a file elsewhere, is replaced by a copy: writing through it would change a file that
    is not ours (a hub cache, the base). The copy is complete and synced before it takes the name.
    """
    for name in names:
        path = directory / name
        with io.explained("cannot look at", path):
            found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            continue
        copy = control / REDO_DIRECTORY / f"{name}.copy"
        io.make_directory(copy.parent)
        with io.explained("cannot read", path), path.open("rb") as source, io.WritableFile(copy, create=True) as target:
            buffer = np.empty(2**20, np.uint8)
            while got := source.readinto(buffer):
                target.append(buffer[:got])
            target.fsync()
        io.rename(copy, path)
        io.fsync_directory(directory)
