"""Applying a layout map with nothing but numpy and torch's own conversion, and telling models apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from gpusync.layout import LayoutMap, named_tensors, segment_groups
from support.models import model_tensors, storage_bytes, tensor_bytes

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def apply_map(layout: LayoutMap, state: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Writes a checkpoint into the params by the map alone, run by run."""
    params = named_tensors(model)
    for name, placement in layout.placements.items():
        for group in segment_groups(placement.pieces) if placement.is_patched else ():
            source, target = tensor_bytes(state[name]), storage_bytes(params[group.param])
            if group.converts is not None:
                source, target = source.view(_word(group.dtype)), target.view(_word(group.converts))
            for src, dst, count in runs_of(group.table.rows):
                target[dst : dst + count] = _cast(source[src : src + count], group.dtype, group.converts)


def runs_of(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """(source, destination, length) of every run of a segment table, in its order."""
    return [
        (int(s["src_offset"] + r * s["src_stride"]), int(s["dst_offset"] + r * s["dst_stride"]), int(s["row_bytes"]))
        for s in rows
        for r in range(s["rows"])
    ]


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Every param, buffer and derived tensor has the same bytes in both."""
    found = dict(model_tensors(model))
    for name, tensor in model_tensors(expected):
        assert tensor_bytes(found[name]).tobytes() == tensor_bytes(tensor).tobytes(), name


def _word(dtype: str) -> np.dtype:
    return np.dtype(f"u{TORCH[dtype].itemsize}")


def _cast(words: np.ndarray, dtype: str, converts: str | None) -> np.ndarray:
    if converts is None:
        return words
    floats = torch.from_numpy(words.view(f"i{words.itemsize}").copy()).view(TORCH[dtype])
    return floats.to(TORCH[converts]).view(torch.uint8).numpy().view(_word(converts))
