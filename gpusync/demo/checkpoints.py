"""Checkpoint directories around the demo: written as a trainer saves them, read whole as an engine reloads them, and
compared byte by byte."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import safetensors

from gpusync.errors import DigestMismatchError
from gpusync.stream import INDEX_NAME, Checkpoint, OpenFiles, read_checkpoint
from gpusync.stream.writer import ShardEntry, write_shard

_SHARD_BYTES = 512 << 20
_WINDOW_BYTES = 16 << 20


def write_checkpoint(directory: Path, tensors: Iterable[ShardEntry]) -> int:
    """Write a Hugging Face checkpoint of bounded shards; returns the bytes of all tensors. `directory` is new."""
    directory.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    pending: list[ShardEntry] = []
    total = 0

    def flush() -> None:
        if pending:
            shard = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            write_shard(directory, shard, pending, {"format": "pt"})
            weight_map.update((entry.name, shard) for entry in pending)
            pending.clear()

    for tensor in tensors:
        if sum(entry.nbytes for entry in pending) + tensor.nbytes > _SHARD_BYTES:
            flush()
        pending.append(tensor)
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1))
    return total


def time_full_reload(directory: Path) -> float:
    """Seconds to read every tensor of a checkpoint with the safetensors library: what a reload from disk takes at
    least, before an engine does anything with the tensors."""
    began = time.perf_counter()
    for shard in sorted(directory.glob("*.safetensors")):
        safetensors.deserialize(shard.read_bytes())  # type: ignore[no-untyped-call]
    return time.perf_counter() - began


def check_equal(found_dir: Path, expected_dir: Path) -> None:
    """Compare every tensor of two checkpoints, bit for bit. Raises DigestMismatchError at the first difference."""
    found, expected = read_checkpoint(found_dir), read_checkpoint(expected_dir)
    if found.tensors.keys() != expected.tensors.keys():
        raise DigestMismatchError("the pulled checkpoint has other tensors than the trainer's", path=found_dir)
    with OpenFiles() as files:
        for name in expected.tensors:
            _check_tensor(name, found, expected, files)


def _check_tensor(name: str, found: Checkpoint, expected: Checkpoint, files: OpenFiles) -> None:
    ours, theirs = found.tensors[name], expected.tensors[name]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        raise DigestMismatchError(
            "the pulled tensor has another form than the trainer's",
            path=found.directory,
            tensor=name,
            expected=f"{theirs.dtype}{list(theirs.shape)}",
            found=f"{ours.dtype}{list(ours.shape)}",
        )
    with found.open_tensor(name, files) as left, expected.open_tensor(name, files) as right:
        for offset in range(0, left.nbytes, _WINDOW_BYTES):
            a, b = (np.empty(min(_WINDOW_BYTES, left.nbytes - offset), np.uint8) for _ in range(2))
            left.read_into(offset, a)
            right.read_into(offset, b)
            if not np.array_equal(a, b):
                place = offset + int(np.flatnonzero(a != b)[0])
                raise DigestMismatchError(
                    f"the pulled tensor differs from the trainer's at byte {place}", path=found.directory, tensor=name
                )
