"""Versions in slime's format, written from its description and not with our publisher, so that the two are compared."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard

from support.checkpoints import INDEX, State, encode_shard, write_checkpoint

DIGESTS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def version_dir(source: Path, version: int) -> Path:
    return source / f"weight_v{version:06d}"


def encode(old: np.ndarray, new: np.ndarray, encoding: str) -> bytes:
    if encoding == "xor":
        raw = (old ^ new).tobytes()
    else:
        at = np.flatnonzero(old != new).astype("<u4")
        raw = struct.pack("<I", at.size) + at.tobytes() + new[at].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(raw)


def publish_delta(
    source: Path,
    version: int,
    old: State,
    new: State,
    *,
    base_version: int | None = None,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    shards: int = 1,
    metadata: Mapping[str, object] | None = None,
    payloads: Mapping[str, bytes] | None = None,
    checksums: Mapping[str, str] | None = None,
) -> Path:
    """One delta version. `metadata`, `payloads` and `checksums` override what would be right."""
    directory = version_dir(source, version)
    directory.mkdir(parents=True)
    changes = [name for name in new if not np.array_equal(old[name].data, new[name].data)]
    weight_map: dict[str, str] = {}
    for number in range(shards):
        mine = changes[number::shards]
        if not mine:
            continue
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        stored = {name: encode(old[name].data, new[name].data, encoding) for name in mine}
        stored |= {name: data for name, data in (payloads or {}).items() if name in stored}
        sums = {name: DIGESTS[checksum](new[name].data.tobytes()) for name in mine}
        sums |= {name: text for name, text in (checksums or {}).items() if name in sums}
        entries = [(name, "U8", [len(data)], data) for name, data in stored.items()]
        (directory / file).write_bytes(encode_shard(entries, sums))
        weight_map |= dict.fromkeys(mine, file)
    told = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1 if base_version is None else base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
        **(metadata or {}),
    }
    (directory / INDEX).write_text(json.dumps({"metadata": told, "weight_map": weight_map}))
    return directory


def publish_full(source: Path, version: int, state: State, *, files: Mapping[str, str] | None = None) -> Path:
    return write_checkpoint(version_dir(source, version), state, files=files)
