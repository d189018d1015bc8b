"""Small checkpoints as plain dictionaries, written and read with nothing of gpusync."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

INDEX = "model.safetensors.index.json"
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "BOOL": 1, "I64": 8}


@dataclass(frozen=True, eq=False)
class Tensor:
    """Bytes of one tensor. Equal when dtype, shape and every byte are."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, self.data.tobytes()) == (other.dtype, other.shape, other.data.tobytes())


State = dict[str, Tensor]


def tensor(rng: np.random.Generator, dtype: str, *shape: int) -> Tensor:
    nbytes = int(np.prod(shape, dtype=np.int64)) * WIDTH[dtype]
    return Tensor(dtype, shape, rng.integers(0, 256, nbytes, dtype=np.uint8))


def small_state(seed: int = 0) -> State:
    """A few tensors of several dtypes: odd sizes, scalars, nothing at all, and one of more than two windows."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": tensor(rng, "BF16", 1200, 1000),
        "layer.0.weight": tensor(rng, "BF16", 64, 48),
        "layer.0.scale": tensor(rng, "F32"),
        "layer.0.codes": tensor(rng, "F8_E4M3", 31, 17),
        "layer.1.weight": tensor(rng, "F16", 33, 7),
        "empty": tensor(rng, "F32", 0, 4),
        "step": tensor(rng, "I64", 3),
    }


def changed(
    state: Mapping[str, Tensor], seed: int, *, share: float = 0.01, names: Sequence[str] | None = None
) -> State:
    """The next state: about `share` of the bytes of each named tensor (all of them by default) differ."""
    rng = np.random.default_rng(seed)
    after = dict(state)
    for name in state if names is None else names:
        data = state[name].data.copy()
        if data.size:
            at = np.unique(rng.integers(0, data.size, max(1, int(data.size * share))))
            data[at] ^= rng.integers(1, 256, at.size, dtype=np.uint8)
        after[name] = Tensor(state[name].dtype, state[name].shape, data)
    return after


def encode_shard(entries: Sequence[tuple[str, str, Sequence[int], bytes]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in entries)


def write_checkpoint(
    directory: Path, state: Mapping[str, Tensor], *, shards: int = 2, files: Mapping[str, str] | None = None
) -> Path:
    """A Hugging Face checkpoint with an index and `config.json`; `files` are further side files."""
    directory.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(state), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        entries = [(name, state[name].dtype, state[name].shape, state[name].data.tobytes()) for name in mine]
        (directory / file).write_bytes(encode_shard(entries, {"format": "pt"}))
        weight_map |= dict.fromkeys(mine, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    for name, text in {"config.json": '{"model_type": "tiny"}', **(files or {})}.items():
        (directory / name).write_text(text)
    return directory


def read_state(directory: Path) -> State:
    """Every tensor of a checkpoint, by the files its index names."""
    index = directory / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found: State = {}
    for file in sorted(files):
        raw = (directory / file).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), np.frombuffer(raw[begin:end], np.uint8))
    return found


def snapshot(directory: Path) -> dict[str, bytes]:
    """All regular files of a directory but our own bookkeeping, to show that nothing changed."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
