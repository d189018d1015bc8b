"""The weights of a checkpoint as one tensor-parallel rank holds them.

The rule: a 2-D tensor whose first dimension is divisible by the number of ranks is split there, in equal parts in the
order of the ranks; every other tensor is held whole by all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gpusync.digest import digest_of
from gpusync.engines.agent.split import rows_of
from gpusync.errors import LayoutError
from gpusync.layout import TensorForm
from gpusync.layout.dtypes import TORCH_DTYPES, torch_shape


class HeldWeights(torch.nn.Module):
    """This rank's part of every tensor, in the checkpoint's dtypes. Empty until it was loaded."""

    def __init__(self, tensors: Mapping[str, TensorForm], *, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        self._rows: dict[str, tuple[int, int] | None] = {}
        self._buffer_names: dict[str, str] = {}
        for number, (name, form) in enumerate(tensors.items()):
            if form.dtype not in TORCH_DTYPES:
                raise LayoutError("torch has no such dtype", tensor=name, found=form.dtype)
            shape = torch_shape(form.dtype, form.shape)
            rows = self._rows[name] = rows_of(shape, rank=rank, size=size)
            held = shape if rows is None else (rows[1] - rows[0], *shape[1:])
            self._buffer_names[name] = f"tensor_{number:06d}"  # a module's own names hold no dots
            self.register_buffer(
                self._buffer_names[name], torch.zeros(held, dtype=TORCH_DTYPES[form.dtype], device=device)
            )

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's part of each of them."""
        for name, tensor in tensors:
            rows = self._rows.get(name)
            part = tensor if rows is None else tensor[rows[0] : rows[1]]
            self.held(name).copy_(part)

    def held(self, name: str) -> torch.Tensor:
        if name not in self._buffer_names:
            raise LayoutError("no such tensor is held", tensor=name)
        return self.get_buffer(self._buffer_names[name])

    def digests(self) -> dict[str, dict[str, object]]:
        """xxh3-128 of the bytes of each part that is held, and its rows (None: all of them)."""
        told: dict[str, dict[str, object]] = {}
        for name, rows in self._rows.items():
            data = self.held(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            told[name] = {"digest": digest_of("xxh3-128", memoryview(data)), "rows": rows}
        return told
