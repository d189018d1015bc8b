"""A version of slime's xor taken by its receiver's steps: from its description (PRs 2089 and 2181), not from its code.

Each tensor is decompressed whole, xored into the mapped file, and digested there. Nothing is synced, and what fails
half way stays half way. For comparison with `gpusync.pull`, which leads to the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zstandard

from gpusync.digest import digest_of
from gpusync.stream import OpenFiles, read_checkpoint, read_version


def pull_as_slime(local_checkpoint_dir: Path, *, source_dir: Path, version: int) -> None:
    """Bring a writable checkpoint from the version before to `version`. Raises ValueError for a wrong result."""
    tensors = read_checkpoint(local_checkpoint_dir).tensors
    published = read_version(source_dir, version)
    maps: dict[str, np.memmap] = {}
    with OpenFiles() as files:
        for name, payload in published.tensors.items():
            stored = tensors[name]
            if stored.file not in maps:
                maps[stored.file] = np.memmap(local_checkpoint_dir / stored.file, np.uint8, "r+")
            frame = np.empty(payload.nbytes, np.uint8)
            with published.open_payload(name, files) as source:
                source.read_into(0, frame)
            words = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
            mapped = maps[stored.file][stored.offset : stored.offset + stored.nbytes]
            np.bitwise_xor(mapped, words, out=mapped)
            if digest_of(str(published.index.checksum_format), mapped) != payload.checksum:
                raise ValueError(f"tensor {name} is wrong")
