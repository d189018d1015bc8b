"""Any torch module whose checkpoint holds its state dict, models of transformers among them.

Its loader is made here: a checkpoint's tensor is copied into the parameter or buffer of its name. Nothing but copies,
so the module is traced where it stands, and everything but converted dtypes is patched byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gpusync.errors import LayoutError
from gpusync.layout import named_tensors
from gpusync.stream import read_checkpoint
from gpusync.sync import WeightSync

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


def weight_sync(
    module: torch.nn.Module,
    *,
    base_dir: str | os.PathLike[str],
    local_checkpoint_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str],
    group: Any | None = None,
    allow_missing: bool = False,
    **options: Any,
) -> WeightSync:
    """A WeightSync of `module`, which was loaded from `base_dir` or from the local checkpoint.

    With `group`, every rank calls this with its own module, each of which holds all weights. LayoutError names a
    parameter that the checkpoint would leave as it is; `allow_missing` accepts that. `options` are WeightSync's.
    """
    tensors = read_checkpoint(base_dir, follow_links=True).tensors
    return WeightSync(
        module,
        load_weights=make_loader(module, tensors, allow_missing=allow_missing),
        base_dir=base_dir,
        local_checkpoint_dir=local_checkpoint_dir,
        source_dir=source_dir,
        group=group,
        **options,
    )


def make_loader(module: torch.nn.Module, checkpoint: Iterable[str], *, allow_missing: bool = False) -> Load:
    """`load_weights` for a checkpoint with these tensor names.

    Of tied weights, one tensor of the checkpoint is loaded: the first of the module's names that it has. A tensor that
    the module has no place for is left out, as an engine's loader does.
    """
    places = find_places(module, set(checkpoint))
    missing = [] if allow_missing else list(_missing(module, places))
    if missing:
        raise LayoutError(
            "the checkpoint leaves parameters of the module as they are", tensor=missing[0], found=f"{len(missing)}"
        )

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = named_tensors(module)
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in places:
                    continue
                target = held[places[name]]
                if target.shape != tensor.shape:
                    raise LayoutError(
                        "shape is not the module's",
                        tensor=name,
                        expected=tuple(target.shape),
                        found=tuple(tensor.shape),
                    )
                target.copy_(tensor)

    return load_weights


def find_places(module: torch.nn.Module, checkpoint: set[str]) -> dict[str, str]:
    """Checkpoint's name -> module's name, one for each tensor in memory that the checkpoint has."""
    places: dict[str, str] = {}
    seen: set[tuple[object, ...]] = set()
    prefix = getattr(module, "base_model_prefix", "")  # transformers saves a model with or without its head's prefix
    for name, tensor in named_tensors(module).items():
        key = _memory(tensor)
        stored = next((each for each in _spellings(name, prefix) if each in checkpoint), None)
        if stored is None or key in seen:
            continue
        seen.add(key)
        places[stored] = name
    return places


def _missing(module: torch.nn.Module, places: Mapping[str, str]) -> Iterator[str]:
    """Names of the state dict whose memory no tensor of the checkpoint goes to. Buffers that are not saved are not of
    the state dict; empty tensors hold nothing."""
    held = named_tensors(module)
    filled = {_memory(held[name]) for name in places.values()}
    for name in module.state_dict(keep_vars=True):
        tensor = held.get(name)
        if tensor is not None and tensor.numel() and _memory(tensor) not in filled:
            yield name


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same bytes."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _spellings(name: str, prefix: str) -> Iterator[str]:
    yield name
    if prefix:
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")
