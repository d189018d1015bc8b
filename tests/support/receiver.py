"""A receiver as slime's, from its description: takes every `*.safetensors` of a version, whatever the index names.

It uses nothing of gpusync, so that a publisher and a reader of ours cannot agree on a mistake.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import zstandard

from support.checkpoints import INDEX, State, Tensor, read_state
from support.slime import DIGESTS, version_dir


def receive(base: State, source: Path, target: int) -> State:
    """The state at `target`: back to a full version or the base, then delta by delta, every checksum checked."""
    index = json.loads((version_dir(source, target) / INDEX).read_text())
    metadata = index["metadata"]
    assert int(metadata["version"]) == target
    if "delta_encoding" not in metadata:
        return read_state(version_dir(source, target))
    base_version = int(metadata["base_version"])
    state = dict(base) if base_version == 0 else receive(base, source, base_version)
    for name, (payload, checksum) in _payloads(version_dir(source, target)).items():
        data = state[name].data.copy()
        _apply(data, payload, metadata["delta_encoding"])
        assert DIGESTS[metadata["checksum_format"]](data.tobytes()) == checksum, name
        state[name] = Tensor(state[name].dtype, state[name].shape, data)
    return state


def _payloads(directory: Path) -> dict[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        checksums = header.pop("__metadata__", {})
        for name, entry in header.items():
            assert name not in found, f"{name} stands in two files"
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = raw[begin:end], checksums[name]
    return found


def _apply(data: np.ndarray, payload: bytes, encoding: str) -> None:
    raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    if encoding == "xor":
        data ^= raw
        return
    assert encoding == "overwrite"
    count = int(raw[:4].view("<u4")[0])
    data[raw[4 : 4 + 4 * count].view("<u4")] = raw[4 + 4 * count :]
