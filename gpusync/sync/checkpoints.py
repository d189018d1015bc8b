"""Checkpoints as attach and reload take them: tensors to read by name, or as torch tensors one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gpusync.layout.dtypes import TORCH_DTYPES, torch_shape
from gpusync.stream import ByteSource, Checkpoint, OpenFiles


def reader_of(checkpoint: Checkpoint, files: OpenFiles) -> Callable[[str], ByteSource]:
    """Tensors by name, readable while `files` is open."""

    def read(name: str) -> ByteSource:
        with checkpoint.open_tensor(name, files) as source:
            return source  # holds no file between reads

    return read


def torch_tensors(checkpoint: Checkpoint, files: OpenFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one at a time, with its name."""
    for name, stored in checkpoint.tensors.items():
        data = torch.empty(stored.nbytes, dtype=torch.uint8)
        with checkpoint.open_tensor(name, files) as source:
            source.read_into(0, memoryview(data.numpy()))
        yield name, data.view(TORCH_DTYPES[stored.dtype]).reshape(torch_shape(stored.dtype, stored.shape))
