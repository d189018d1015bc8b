"""The tensors of a model that a loader can write: its params and buffers, by name and by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from gpusync.errors import LayoutError
from gpusync.layout.dtypes import SAFETENSORS_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamForm:
    """How a param or buffer looks at its storage: `offset` and `stride` in elements. `storage` is that storage's name,
    the first name of the model that uses it. `dtype` is safetensors' name, or torch's own where that has none.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageForm:
    """`data_ptr` and `device` are None until attach has seen the params that serve."""

    nbytes: int
    data_ptr: int | None = None
    device: str | None = None


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All params and buffers of the model, under every name; not those whose shape a loader has yet to find."""
    every: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    every.update(model.named_buffers(remove_duplicate=False))
    lazy = UninitializedTensorMixin
    return {name: tensor for name, tensor in every.items() if not isinstance(tensor, lazy)}


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all views of one storage, and unique while it lives, with memory behind it or without."""
    return int(tensor.untyped_storage()._cdata)


def dtype_name(dtype: torch.dtype) -> str:
    return SAFETENSORS_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def read_forms(params: Mapping[str, torch.Tensor]) -> tuple[dict[str, ParamForm], dict[str, StorageForm]]:
    """The forms of the params, and of their storages, without addresses.

    Raises LayoutError for a tensor that has no plain storage of its own: sparse, or a subclass that wraps others.
    """
    names: dict[int, str] = {}
    forms: dict[str, ParamForm] = {}
    storages: dict[str, StorageForm] = {}
    for name, tensor in params.items():
        _check_plain(name, tensor)
        storage = names.setdefault(storage_key(tensor), name)
        forms[name] = ParamForm(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            storage=storage,
        )
        storages.setdefault(storage, StorageForm(nbytes=tensor.untyped_storage().nbytes()))
    return forms, storages


class ModelState:
    """Which tensors the modules of a model hold, and in which storages, so that a loader that exchanges them is seen
    and undone. It keeps the tensors alive, but copies nothing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held = [(table, dict(table)) for table in _tables(model)]
        self._data = [(name, tensor, tensor.detach()) for name, tensor in named_tensors(model).items()]

    def changes(self) -> list[str]:
        """Names of params and buffers that are not what they were: another tensor, storage, shape or strides."""
        now = named_tensors(self._model)
        changed = {name for name, tensor, was in self._data if now.get(name) is not tensor or not _same(tensor, was)}
        return sorted(changed | (now.keys() - {name for name, _, _ in self._data}))

    def restore(self) -> None:
        """Makes every module hold again what it held. Of modules that were added or exchanged nothing is undone."""
        for table, held in self._held:
            table.clear()
            table.update(held)
        for _, tensor, was in self._data:
            if not _same(tensor, was):
                tensor.data = was


def iterate_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every dense tensor that a module of the model holds: also in plain attributes, and lists and dicts of them."""
    for path, module in model.named_modules():
        plain = {
            name: value for name, value in vars(module).items() if name not in ("_modules", "_parameters", "_buffers")
        }
        for attribute, value in {**module._parameters, **module._buffers, **plain}.items():
            for tensor in _tensors_in(value):
                yield f"{path}.{attribute}".lstrip("."), tensor


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    # A wrapper's own dispatch gives it away: its bytes lie in other tensors.
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or tensor.layout != torch.strided:
        found = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise LayoutError(f"parameter `{name}` has no plain storage", expected="a dense tensor", found=found)


def _tables(model: torch.nn.Module) -> Iterable[dict[str, Any]]:
    for module in model.modules():
        yield module._parameters
        yield module._buffers


def _same(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    return (
        storage_key(tensor) == storage_key(was)
        and tensor.shape == was.shape
        and tensor.stride() == was.stride()
        and tensor.storage_offset() == was.storage_offset()
        and tensor.dtype == was.dtype
    )


def _tensors_in(value: object, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        # Others have no storage to tell them by.
        if not isinstance(value, UninitializedTensorMixin) and value.layout == torch.strided:
            yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
