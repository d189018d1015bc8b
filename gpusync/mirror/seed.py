"""Seeding a local checkpoint: copy a full checkpoint (the base, or a full version) beside it, applying the
deltas that follow it on the way and digesting every tensor. The journal then puts the files in place."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpusync.errors import HeaderError, StreamError, Where
from gpusync.mirror import io
from gpusync.mirror.change import Bytes, TensorChange, apply_change, published_checksum
from gpusync.mirror.state import Checksum
from gpusync.mirror.workers import for_each
from gpusync.stream import INDEX_NAME, Checkpoint, OpenFiles, ShardHeader, SourceFile
from gpusync.stream.header import LENGTH_BYTES, METADATA_KEY

SIDE_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja")
CODE_SUFFIX = ".py"
MAX_SIDE_BYTES = 2 * 2**30
MAX_SIDE_FILES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Verified and copied, not yet decided: `install` are the names to put in place."""

    install: tuple[str, ...]
    checksums: Mapping[str, Checksum]
    tensors_changed: int
    unverified_tensors: int


def prepare_seed(
    checkpoint: Checkpoint,
    changes: Mapping[str, TensorChange],
    *,
    into: Path,
    side_files: Mapping[str, Path],
    sources: OpenFiles,
    workers: int,
    progress: Callable[[int], None],
) -> Seed:
    """Copy `checkpoint` with `changes` applied, and `side_files` (name to source), into the new directory `into`.

    Everything is verified against the newest published checksums (`unverified_tensors` counts those that nobody
    published any of) and synced when this returns; nothing outside `into` was written.
    """
    io.make_directory(into)
    checksums: dict[str, Checksum] = {}
    unverified = 0
    with ExitStack() as stack:
        files: dict[str, io.WritableFile] = {}
        for name, header in checkpoint.headers.items():
            files[name] = stack.enter_context(io.WritableFile(into / name, create=True))
            files[name].allocate(header.file_bytes)
            files[name].write_at(_local_header(header), 0)

        def copy(_: int, change: TensorChange) -> None:
            tensor = change.base

            def write(offset: int, _old: Bytes, new: Bytes) -> None:
                files[tensor.file].write_at(new, tensor.offset + offset)

            with checkpoint.open_tensor(tensor.name, sources) as base:
                where = Where(path=checkpoint.directory / tensor.file, tensor=tensor.name)
                checksums[tensor.name] = apply_change(change, base=base, sources=sources, sink=write, where=where)
            progress(tensor.nbytes)

        copies = [
            changes.get(name)
            or TensorChange(base=tensor, deltas=(), published=published_checksum(checkpoint.index, tensor))
            for name, tensor in checkpoint.tensors.items()
        ]
        unverified = sum(change.expected is None for change in copies)
        for_each(copies, copy, workers=workers, size=lambda change: change.base.nbytes)
        for file in files.values():
            file.fsync()
    _copy_side_files(side_files, into)
    others = list(side_files)
    if (checkpoint.directory / INDEX_NAME).exists():
        others.append(INDEX_NAME)
        with io.WritableFile(into / INDEX_NAME, create=True) as file:
            file.append(_local_index(checkpoint))
            file.fsync()
    io.fsync_directory(into)
    return Seed(
        install=(*checkpoint.headers, *others),
        checksums=checksums,
        tensors_changed=len(changes),
        unverified_tensors=unverified,
    )


def find_side_files(directory: Path, *, with_code: bool, follow_links: bool) -> dict[str, Path]:
    """Regular files beside the tensors that belong to the model: configuration, tokenizer, templates; code if asked.

    A link is passed over unless `follow_links`; then the path it leads to is returned.
    """
    suffixes = (*SIDE_FILE_SUFFIXES, CODE_SUFFIX) if with_code else SIDE_FILE_SUFFIXES
    return {
        entry.name: entry.resolve() if follow_links else entry
        for entry in directory.iterdir()
        if entry.suffix in suffixes
        and entry.name != INDEX_NAME
        and entry.is_file()
        and entry.name.isprintable()  # a name that is no text cannot be told of, nor written down
        and (follow_links or not entry.is_symlink())
    }


def _copy_side_files(side_files: Mapping[str, Path], into: Path) -> None:
    """Copy them window by window. StreamError for more, or larger ones, than any model has."""
    total = 0
    for name, path in side_files.items():
        with SourceFile(path) as source, io.WritableFile(into / name, create=True) as target:
            total += source.nbytes
            if total > MAX_SIDE_BYTES or len(side_files) > MAX_SIDE_FILES:
                raise StreamError(
                    "the side files are too large to follow",
                    path=path,
                    expected=f"at most {MAX_SIDE_FILES} files of {MAX_SIDE_BYTES} bytes together",
                    found=f"{len(side_files)} files, {total} bytes and more",
                )
            window = np.empty(min(2**20, source.nbytes), np.uint8)
            for offset in range(0, source.nbytes, 2**20):
                part = window[: min(2**20, source.nbytes - offset)]
                source.read_into(offset, part)
                target.append(part)
            target.fsync()


def _local_header(header: ShardHeader) -> bytes:
    """The shard's header as it should stand locally: without checksums, which the next delta would make untrue.

    Made from what was validated, never read again: a source may change under us. Padded with spaces to its old length,
    so that no tensor moves.
    """
    metadata = {key: value for key, value in header.metadata.items() if key not in header.tensors}
    entries: dict[str, object] = {METADATA_KEY: metadata} if metadata else {}
    for tensor in header.tensors.values():
        begin = tensor.offset - header.data_offset
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
    length = header.data_offset - LENGTH_BYTES
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > length:
        raise HeaderError("a header does not fit its own length", expected=length, found=len(text))
    return struct.pack("<Q", length) + text.ljust(length)


def _local_index(checkpoint: Checkpoint) -> bytes:
    weight_map = {name: tensor.file for name, tensor in checkpoint.tensors.items()}
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    told = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(told, indent=2, ensure_ascii=False).encode()
