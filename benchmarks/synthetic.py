"""A decoder-like bf16 checkpoint of any size, and the states that optimizer steps make of it.

Nothing of it is trained. Weights are Gaussian with a scale per row. A step moves a master by about the same amount
whatever its size, so an element changes by `floor(move / ulp + u)` units in the last place, u uniform: rarely where
the exponent is large, always and by several units near zero. That is what real AdamW streams look like: about 1 % of
the elements changed, some 90 % of them by one unit, more where a row's weights are small. Changes still cluster less
than in real streams: at 1 % they touch 26 % of the 64-byte lines, real ones up to 18 %.

Files are written window by window: memory does not grow with the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpusync.stream import INDEX_NAME, Checkpoint, OpenFiles, StoredTensor, TensorSpec, encode_header, read_checkpoint

Bf16 = npt.NDArray[np.uint16]

WINDOW_ELEMENTS = 1 << 22
SIZES = {"toy": 6_000_000, "1GB": 1_000_000_000, "3GB": 3_000_000_000}

_WEIGHT_STD = 0.05
_ROW_SCALE_SPREAD = 0.6
_SHARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`density` is the share of elements that one step changes, on average over the large matrices."""

    nbytes: int
    density: float = 0.01
    seed: int = 0


def write_base(directory: Path, settings: Settings) -> int:
    """Write the checkpoint every stream starts from; returns its number of elements. `directory` is new."""

    def windows(number: int, name: str, shape: tuple[int, ...]) -> Iterator[Bf16]:
        columns = shape[-1]
        for start, size in _windows(math.prod(shape)):
            rng = np.random.default_rng([settings.seed, number, start])
            if len(shape) == 1:
                yield _truncated(1 + 0.1 * rng.standard_normal(size, np.float32))
                continue
            rows = np.arange(start // columns, (start + size - 1) // columns + 1)
            scales = _row_scales(settings.seed, number, shape[0])[rows].repeat(columns)[start % columns :][:size]
            yield _truncated(rng.standard_normal(size, np.float32) * scales)

    layout = decoder_layout(settings.nbytes)
    _write(directory, layout, windows)
    return sum(math.prod(shape) for shape in layout.values())


def write_next(before_dir: Path, directory: Path, settings: Settings, *, step: int) -> int:
    """Write the state one step after the one in `before_dir`; returns how many elements differ."""
    before = read_checkpoint(before_dir)
    units = units_per_exponent(settings.density)
    changed = 0

    def windows(number: int, name: str, shape: tuple[int, ...]) -> Iterator[Bf16]:
        nonlocal changed
        with OpenFiles() as files:
            for start, words in _stored_windows(before, before.tensors[name], files):
                rng = np.random.default_rng([settings.seed, step, number, start])
                changed += _move(words, units, rng)
                yield words

    _write(directory, {name: tensor.shape for name, tensor in before.tensors.items()}, windows)
    return changed


def make_weights(shape: tuple[int, ...], *, seed: int) -> Bf16:
    """One tensor as `write_base` makes them, in memory."""
    rng = np.random.default_rng(seed)
    if len(shape) == 1:
        return _truncated(1 + 0.1 * rng.standard_normal(shape[0], np.float32))
    weights = rng.standard_normal(shape, np.float32) * _row_scales(seed, 0, shape[0])[:, None]
    return _truncated(weights.reshape(-1))


def make_step(words: Bf16, density: float, *, seed: int) -> Bf16:
    """The tensor one step later, as `write_next` makes it."""
    moved = words.copy()
    units = units_per_exponent(density)
    for start, size in _windows(words.size):
        _move(moved[start : start + size], units, np.random.default_rng([seed, start]))
    return moved


def decoder_layout(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-like model of about `nbytes` in bf16, never more than that but for the smallest."""
    hidden, feed_forward, kv, vocabulary = (2048, 5632, 512, 32_000) if nbytes > 500_000_000 else (256, 704, 64, 2_000)
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (feed_forward, hidden),
        "mlp.up_proj.weight": (feed_forward, hidden),
        "mlp.down_proj.weight": (hidden, feed_forward),
    }
    block_bytes = 2 * sum(math.prod(shape) for shape in block.values())
    layers = max(1, (nbytes - 2 * 2 * vocabulary * hidden) // block_bytes)
    layout: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        layout |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return layout | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def units_per_exponent(density: float) -> npt.NDArray[np.float32]:
    """How far one step moves an element, in units in the last place, by its exponent field (256 entries).

    The move is the same for all; its size is found by bisection so that `density` of Gaussian elements change.
    """
    rng = np.random.default_rng(0)
    scales = _WEIGHT_STD * np.exp(_ROW_SCALE_SPREAD * rng.standard_normal(1 << 18)).astype(np.float32)
    share = np.bincount(_exponent(_truncated(rng.standard_normal(1 << 18, np.float32) * scales)), minlength=256) / (
        1 << 18
    )
    # An ulp of bf16 is 2^(exponent - 127 - 7); subnormals have the one of exponent 1.
    ulps = 2.0 ** (np.maximum(np.arange(256), 1) - 134.0)
    low, high = -60.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share @ np.minimum(1, 2.0**middle / ulps) < density else (low, middle)
    # Beyond this many units a move would leave the value's neighbourhood; elements that close to zero are very few.
    return np.minimum(2.0**low / ulps, 512).astype(np.float32)


def _move(words: Bf16, units: npt.NDArray[np.float32], rng: np.random.Generator) -> int:
    """One step, in place; returns how many elements changed."""
    moves = units[_exponent(words)] + rng.random(words.size, np.float32)
    positions = np.flatnonzero(moves >= 1)
    distance = moves[positions].astype(np.int32) * rng.choice(np.array([-1, 1], np.int32), positions.size)
    words[positions] = _from_ordered(_ordered(words[positions]) + distance)
    return positions.size


def _exponent(words: Bf16) -> npt.NDArray[np.uint16]:
    return (words >> np.uint16(7)) & np.uint16(0xFF)


def _ordered(words: Bf16) -> npt.NDArray[np.int32]:
    """Bit patterns as integers in the order of their values."""
    magnitude = (words & 0x7FFF).astype(np.int32)
    return np.where(words & 0x8000, -magnitude, magnitude)


def _from_ordered(codes: npt.NDArray[np.int32]) -> Bf16:
    return np.where(codes < 0, 0x8000 - codes, codes).astype(np.uint16)


def _truncated(values: npt.NDArray[np.float32]) -> Bf16:
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _row_scales(seed: int, number: int, rows: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng([seed, number])
    return (_WEIGHT_STD * np.exp(_ROW_SCALE_SPREAD * rng.standard_normal(rows))).astype(np.float32)


def _windows(elements: int) -> Iterator[tuple[int, int]]:
    for start in range(0, elements, WINDOW_ELEMENTS):
        yield start, min(WINDOW_ELEMENTS, elements - start)


def _stored_windows(checkpoint: Checkpoint, tensor: StoredTensor, files: OpenFiles) -> Iterator[tuple[int, Bf16]]:
    with checkpoint.open_tensor(tensor.name, files) as source:
        for start, size in _windows(tensor.nbytes // 2):
            words = np.empty(size, np.uint16)
            source.read_into(2 * start, words.view(np.uint8))
            yield start, words


def _write(
    directory: Path,
    layout: dict[str, tuple[int, ...]],
    windows: Callable[[int, str, tuple[int, ...]], Iterator[Bf16]],
) -> None:
    directory.mkdir(parents=True)
    specs = [TensorSpec(name=name, dtype="BF16", shape=s, nbytes=2 * math.prod(s)) for name, s in layout.items()]
    numbers = {name: number for number, name in enumerate(layout)}
    weight_map = {}
    for number, shard in enumerate(_shards(specs), start=1):
        file_name = f"model-{number:05d}.safetensors"
        with (directory / file_name).open("wb") as file:
            file.write(encode_header(shard, {"format": "pt"}))
            for spec in shard:
                for window in windows(numbers[spec.name], spec.name, spec.shape):
                    file.write(window.data)
        weight_map.update({spec.name: file_name for spec in shard})
    total = sum(spec.nbytes for spec in specs)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))


def _shards(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    limit = math.ceil(sum(spec.nbytes for spec in specs) / _SHARDS)
    shard: list[TensorSpec] = []
    for spec in specs:
        if shard and sum(s.nbytes for s in shard) + spec.nbytes > limit:
            yield shard
            shard = []
        shard.append(spec)
    yield shard
