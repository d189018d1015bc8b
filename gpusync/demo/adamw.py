"""AdamW on fp32 master weights, and the cast of masters to bf16 that a trainer exports.

Only the cast decides what an engine sees: most steps of a small learning rate stay inside an element's bf16 rounding
cell, and that is why a weight sync is sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bf16 = npt.NDArray[np.uint16]
Fp32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """The recipe usual in RL of language models; `clip` bounds the norm of all gradients together."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(slots=True)
class Moments:
    """One tensor's running means of the gradient and of its square."""

    mean: Fp32
    square: Fp32

    @classmethod
    def zeros_like(cls, master: Fp32) -> Moments:
        return cls(np.zeros_like(master), np.zeros_like(master))


@dataclass(slots=True)
class AdamW:
    """Owns the masters and changes them in place."""

    masters: dict[str, Fp32]
    settings: AdamWSettings = field(default_factory=AdamWSettings)
    steps: int = 0
    moments: dict[str, Moments] = field(init=False)

    def __post_init__(self) -> None:
        self.moments = {name: Moments.zeros_like(master) for name, master in self.masters.items()}

    def step(self, gradients: Mapping[str, npt.NDArray[np.floating]]) -> float:
        """One optimizer step over every master; returns the norm of the gradients before clipping."""
        norm = float(np.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients.values())))
        scale = min(1.0, self.settings.clip / (norm + 1e-6))
        self.steps += 1
        for name, master in self.masters.items():
            update_master(master, self.moments[name], gradients[name] * np.float32(scale), self.steps, self.settings)
        return norm


def update_master(
    master: Fp32, moments: Moments, gradient: npt.NDArray[np.floating], step: int, settings: AdamWSettings
) -> None:
    """One tensor's step number `step` (from 1), in place: decoupled decay first, then the bias-corrected update."""
    moments.mean += np.float32(1 - settings.beta1) * (gradient - moments.mean)
    moments.square += np.float32(1 - settings.beta2) * (gradient * gradient - moments.square)
    denominator = np.sqrt(moments.square / np.float32(1 - settings.beta2**step))
    denominator += np.float32(settings.epsilon)
    master *= np.float32(1 - settings.lr * settings.weight_decay)
    master -= np.float32(settings.lr / (1 - settings.beta1**step)) * moments.mean / denominator


def to_bf16(master: Fp32) -> Bf16:
    """Round to nearest, ties to even; NaN stays NaN. The result has `master`'s shape and holds bf16 bit patterns."""
    bits = master.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    # The carry could turn a NaN into infinity or zero; quiet it by hand as hardware does.
    quieted = (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return np.where(np.isnan(master), quieted, rounded)


def from_bf16(words: Bf16) -> Fp32:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def spread_in_rounding_cell(words: Bf16, rng: np.random.Generator) -> Fp32:
    """Masters that cast to exactly `words`, uniform over each element's rounding cell.

    This is a run already under way. Masters equal to the bf16 values would sit in the middle of every cell, and the
    first steps would change next to nothing.
    """
    offset = rng.integers(-0x7FFF, 0x8000, words.shape, np.int32)
    magnitude = words & np.uint16(0x7FFF)
    # Below zero there is no bit pattern to borrow from, and beside infinity lies NaN.
    offset = np.where(magnitude == 0, np.abs(offset), offset)
    offset = np.where(magnitude >= 0x7F80, 0, offset)
    return ((words.astype(np.uint32) << np.uint32(16)) + offset.astype(np.uint32)).view(np.float32)
