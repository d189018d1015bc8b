"""The two trainers the demo can run: a small decoder with real gradients, or a checkpoint of yours with seeded noise
for gradients. Both take real AdamW steps on fp32 masters and export bf16."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gpusync.demo.adamw import (
    AdamW,
    AdamWSettings,
    Bf16,
    Fp32,
    Moments,
    from_bf16,
    spread_in_rounding_cell,
    to_bf16,
    update_master,
)
from gpusync.demo.model import DecoderShape, loss_and_gradients, seeded_weights
from gpusync.demo.text import batches, documentation, tokenize
from gpusync.errors import UnsupportedFormatError
from gpusync.stream import Checkpoint, OpenFiles
from gpusync.stream.writer import ShardEntry

# About 50 MB in bf16.
DEMO_SHAPE = DecoderShape(vocabulary=4096, hidden=512, layers=7, heads=8, kv_heads=2, feed_forward=1536)
_BATCH, _LENGTH = 4, 129
# The first steps of AdamW are larger than all later ones, because its moments start at zero.
_STEPS_BEFORE = 5

# A step count at which the moments' bias corrections are gone.
_LATE = 10_000
_WINDOW_ELEMENTS = 1 << 22


class Trainer(Protocol):
    """Starts with steps 0 taken; its export is then what the engines start from."""

    @property
    def description(self) -> str:
        """What is trained, and where its gradients come from."""
        ...

    def step(self) -> float | None:
        """One optimizer step; returns the loss before it, or None where there is none."""
        ...

    def export(self) -> Iterator[ShardEntry]:
        """Every tensor of the checkpoint as it is now, in order."""
        ...


class DecoderTrainer:
    """Next-token training of the numpy decoder on real text. Its forward pass sees the bf16 weights it exports."""

    def __init__(self, *, seed: int, settings: AdamWSettings, shape: DecoderShape = DEMO_SHAPE) -> None:
        rng = np.random.default_rng(seed)
        self._shape = shape
        self._batches = batches(
            tokenize(documentation(), shape.vocabulary), batch=_BATCH, length=_LENGTH, rng=np.random.default_rng(seed)
        )
        masters = {
            name: spread_in_rounding_cell(to_bf16(weight), rng) for name, weight in seeded_weights(shape, rng).items()
        }
        self._optimizer = AdamW(masters, settings)
        for _ in range(_STEPS_BEFORE):
            self.step()

    @property
    def description(self) -> str:
        elements = sum(master.size for master in self._optimizer.masters.values())
        return (
            f"seeded decoder, {self._shape.layers} layers, {elements / 1e6:.1f} M parameters; "
            "gradients of next-token loss on Python's own documentation"
        )

    def step(self) -> float:
        weights = {name: from_bf16(to_bf16(master)) for name, master in self._optimizer.masters.items()}
        loss, gradients = loss_and_gradients(weights, next(self._batches), self._shape)
        self._optimizer.step(gradients)
        return loss

    def export(self) -> Iterator[ShardEntry]:
        for name, master in self._optimizer.masters.items():
            yield _bf16_entry(name, master.shape, to_bf16(master))


class NoiseTrainer:
    """AdamW over a checkpoint whose gradients are seeded noise, as if long under way.

    Holds no state: an export takes every step again from the base, window by window, so that a model of any size needs
    little memory. Only bf16 tensors are trained, the others stay what they are.
    """

    def __init__(self, checkpoint: Checkpoint, *, seed: int, settings: AdamWSettings) -> None:
        """Raises UnsupportedFormatError for a checkpoint without a bf16 tensor."""
        self._checkpoint, self._seed, self._settings = checkpoint, seed, settings
        self._steps = 0
        self._trained = sum(tensor.dtype == "BF16" for tensor in checkpoint.tensors.values())
        if self._trained == 0:
            dtypes = sorted({tensor.dtype for tensor in checkpoint.tensors.values()})
            raise UnsupportedFormatError(
                "the demo trains bf16 tensors only", path=checkpoint.directory, expected="BF16", found=", ".join(dtypes)
            )

    @property
    def description(self) -> str:
        frozen = len(self._checkpoint.tensors) - self._trained
        unchanged = f" ({frozen} tensors that are not bf16 stay unchanged)" if frozen else ""
        return f"{self._checkpoint.directory.name}, {self._trained} tensors; gradients are seeded noise{unchanged}"

    def step(self) -> None:
        self._steps += 1

    def export(self) -> Iterator[ShardEntry]:
        with OpenFiles() as files:
            for name, tensor in self._checkpoint.tensors.items():
                data = np.empty(tensor.nbytes, np.uint8)
                with self._checkpoint.open_tensor(name, files) as source:
                    source.read_into(0, data)
                if tensor.dtype == "BF16":
                    self._train(data.view(np.uint16), name)
                yield ShardEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, data=data)

    def _train(self, words: Bf16, name: str) -> None:
        """Brings `words` from the base to this step, in place."""
        for start in range(0, words.size, _WINDOW_ELEMENTS):
            window = words[start : start + _WINDOW_ELEMENTS]
            rng = np.random.default_rng([self._seed, zlib.crc32(name.encode()), start])
            master = spread_in_rounding_cell(window, rng)
            moments = _settled_moments(master, rng, self._settings)
            for step in range(self._steps):
                gradient = rng.standard_normal(master.size, np.float32)
                update_master(master, moments, gradient, _LATE + step, self._settings)
            window[:] = to_bf16(master)


def _settled_moments(master: Fp32, rng: np.random.Generator, settings: AdamWSettings) -> Moments:
    """What the running means are after many steps of unit noise."""
    std = np.float32(np.sqrt((1 - settings.beta1) / (1 + settings.beta1)))
    return Moments(mean=std * rng.standard_normal(master.size, np.float32), square=np.ones_like(master))


def _bf16_entry(name: str, shape: tuple[int, ...], words: Bf16) -> ShardEntry:
    data: npt.NDArray[np.uint8] = words.reshape(-1).view(np.uint8)
    return ShardEntry(name=name, dtype="BF16", shape=shape, data=data)
