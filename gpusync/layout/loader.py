"""Running an engine's loader under a recorder, and finding out which tensors it cannot load that way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gpusync.layout.dtypes import TORCH_DTYPES, torch_shape
from gpusync.layout.inline_threads import inline_thread_pools
from gpusync.layout.layout_map import TensorForm
from gpusync.layout.record import Record
from gpusync.layout.recorder import Recorder
from gpusync.layout.targets import named_tensors

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def torch_forms(tensors: Iterable[tuple[str, TensorForm]]) -> tuple[Forms, dict[str, str]]:
    """The tensors as torch has them, and why it has no such for the others."""
    forms: Forms = {}
    refused = {}
    for name, tensor in tensors:
        dtype = TORCH_DTYPES.get(tensor.dtype)
        try:
            if dtype is None:
                refused[name] = f"torch has no dtype {tensor.dtype}"
            else:
                forms[name] = (dtype, torch_shape(tensor.dtype, tensor.shape))
        except ValueError as error:
            refused[name] = str(error)
    return forms, refused


def record_loader(model: torch.nn.Module, load_weights: LoadWeights, forms: Forms) -> Record:
    """What the loader does with tensors of these forms. What it cannot load is opaque.

    They are given all at once. Should the loader raise, then in ever smaller parts, to find the tensors it raises for
    alone; and then the others at once again: a loader may wait for several tensors to place them together.
    """
    record = _try(model, load_weights, forms, list(forms))
    if isinstance(record, Record):
        return record
    raised = _find_raising(model, load_weights, forms, list(forms))
    others = [name for name in forms if name not in raised]
    rest = _try(model, load_weights, forms, others)
    if isinstance(rest, str):
        alone = {name: _try(model, load_weights, forms, [name]) for name in others}
        rest = _union(alone, because=rest)
    for name, reason in raised.items():
        rest.refuse([name], reason)
    return rest


def _find_raising(
    model: torch.nn.Module, load_weights: LoadWeights, forms: Forms, names: Sequence[str]
) -> dict[str, str]:
    """The tensors that the loader raises for when it is given them alone, and what."""
    result = _try(model, load_weights, forms, names)
    if isinstance(result, Record):
        return {}
    if len(names) == 1:
        return {names[0]: result}
    middle = len(names) // 2
    halves = [_find_raising(model, load_weights, forms, half) for half in (names[:middle], names[middle:])]
    return {**halves[0], **halves[1]}


def _try(model: torch.nn.Module, load_weights: LoadWeights, forms: Forms, names: Sequence[str]) -> Record | str:
    """What the loader does with these tensors, or what it raises."""
    sources = {name: torch.empty(forms[name][1], dtype=forms[name][0], device="meta") for name in names}
    recorder = Recorder(params=named_tensors(model), sources=sources)
    try:
        with torch.no_grad(), inline_thread_pools(), recorder:
            load_weights(iter(sources.items()))
    # An engine's loader may raise anything for a tensor without data. That tensor is opaque, the others are not.
    except Exception as error:  # noqa: BLE001
        return f"the loader raised {type(error).__name__}: {error}"
    return recorder.finish(model)


def _union(alone: dict[str, Record | str], *, because: str) -> Record:
    """The records of tensors that were given one by one. Where one left no trace, nobody knows what becomes of it."""
    union = Record()
    for name, record in alone.items():
        if isinstance(record, str):
            union.refuse([name], record)
            continue
        for storage, writes in record.writes.items():
            union.writes.setdefault(storage, []).extend(writes)
        for refused, reasons in record.opaque.items():
            for reason in reasons:
                union.refuse([refused], reason)
        if not any(write.tensor == name for writes in record.writes.values() for write in writes):
            union.refuse([name], f"{because}; and given this tensor alone, it placed it nowhere")
    return union
