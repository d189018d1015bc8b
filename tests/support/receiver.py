"""A receiver as slime's, from its description: takes every `*.safetensors` of a version, whatever the index names. It
also knows what our streams add: GS01, GP01 and GF01 payloads, and the further keys of an index.

It uses nothing of gpusync, so that a publisher and a reader of ours cannot agree on a mistake.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from support.checkpoints import INDEX, State, Tensor, read_state
from support.gf01 import decode_gf01
from support.gp01 import decode_gp01
from support.gs01 import decode_gs01
from support.slime import DIGESTS, version_dir

DECODERS = {b"GS01": decode_gs01, b"GP01": decode_gp01, b"GF01": decode_gf01}


def receive(base: State, source: Path, target: int) -> State:
    """The state at `target`: back to a full version or the base, then delta by delta, every checksum checked."""
    directory = version_dir(source, target)
    index = json.loads((directory / INDEX).read_text())
    metadata = index["metadata"]
    assert int(metadata["version"]) == target
    stored = _read_shards(directory, metadata)
    if "delta_encoding" not in metadata:
        state = read_state(directory)
        if "checksum_format" in metadata:
            _check(state, {name: checksum for name, (_, checksum) in stored.items()}, metadata["checksum_format"])
        return state
    base_version = int(metadata["base_version"])
    state = dict(base) if base_version == 0 else receive(base, source, base_version)
    for name, (payload, checksum) in stored.items():
        data = _apply(state[name], payload, metadata["delta_encoding"], metadata["compression_format"])
        state[name] = Tensor(state[name].dtype, state[name].shape, data)
        _check({name: state[name]}, {name: checksum}, metadata["checksum_format"])
    return state


def _read_shards(directory: Path, metadata: Mapping[str, Any]) -> dict[str, tuple[bytes, str | None]]:
    """Name -> stored bytes and the checksum beside them."""
    found: dict[str, tuple[bytes, str | None]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        if "shard_bytes" in metadata:
            assert metadata["shard_bytes"][path.name] == len(raw)
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        checksums = header.pop("__metadata__", {})
        for name, entry in header.items():
            assert name not in found, f"{name} stands in two files"
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = raw[begin:end], checksums.get(name)
    if "payload_checksums" in metadata:
        checksums = {name: xxhash.xxh3_64(data).hexdigest() for name, (data, _) in found.items()}
        assert metadata["payload_checksums"] == checksums
    return found


def _check(state: State, checksums: Mapping[str, str | None], algorithm: str) -> None:
    for name, tensor in state.items():
        assert DIGESTS[algorithm](tensor.data.tobytes()) == checksums[name], name


def _apply(old: Tensor, payload: bytes, encoding: str, compression: str) -> np.ndarray:
    if encoding == "gpusync":
        assert compression == "none"
        return DECODERS[payload[:4]](payload, old.data, old.dtype)
    assert compression == "zstd"
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    if encoding == "xor":
        return old.data ^ raw
    assert encoding == "overwrite"
    data, count = old.data.copy(), int(raw[:4].view("<u4")[0])
    data[raw[4 : 4 + 4 * count].view("<u4")] = raw[4 + 4 * count :]
    return data
