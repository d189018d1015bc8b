"""Binding a traced map to the params that serve, and seeing that they are still where they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from gpusync.errors import RefusedError
from gpusync.layout.layout_map import Demotion, LayoutMap
from gpusync.layout.targets import ParamForm, StorageForm, iterate_attributes, read_forms, storage_key


def attach(layout: LayoutMap, params: Mapping[str, torch.Tensor]) -> tuple[LayoutMap, list[Demotion]]:
    """The map with the addresses of the loaded model's params, and what of it does not hold for them.

    The engine's work after the load may have dropped, replaced or reshaped params. Placements in one whose storage
    cannot be the traced one any more are demoted: another dtype or size, other strides than those of a mere transpose,
    other params that share it. That the bytes are in their places is for `compare` to find out.
    """
    forms, storages = read_forms(params)
    problems = dict(_problems(layout, params, forms, storages))
    demotions = [
        Demotion(tensor=name, reason=problems[piece.param])
        for name, placement in layout.placements.items()
        for piece in [next((p for p in placement.pieces if p.param in problems), None)]
        if piece is not None and placement.is_patched
    ]
    bound = {}
    for name, storage in layout.storages.items():
        tensor = params.get(name)
        bound[name] = storage if tensor is None else _bound(tensor)
    shapes = {name: replace(forms[name], storage=form.storage) for name, form in layout.params.items() if name in forms}
    bound_map = replace(layout, params={**layout.params, **shapes}, storages=bound)
    return bound_map.demoted(demotions), demotions


def check_addresses(layout: LayoutMap, params: Mapping[str, torch.Tensor]) -> None:
    """Raises RefusedError, naming the param, unless every param that a placement is patched in lies where it lay at
    attach, with the same storage, shape and strides: released, asleep, moved, or replaced ones must not be written, and
    captured graphs know the old addresses only.
    """
    patched = layout.patched_storages
    for name, form in layout.params.items():
        if form.storage not in patched:
            continue
        storage, tensor = layout.storages[form.storage], params.get(name)
        if storage.data_ptr is None:
            raise RefusedError(f"parameter `{name}` was never attached")
        if tensor is None:
            raise RefusedError(f"parameter `{name}` is gone", expected=_address(storage), found="nothing")
        now = _bound(tensor)
        if now != storage:
            raise RefusedError(
                f"parameter `{name}` has moved, or was released", expected=_address(storage), found=_address(now)
            )
        shape = (form.shape, form.stride, form.offset)
        found = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        if found != shape:
            raise RefusedError(
                f"parameter `{name}` is another view of its storage",
                expected="shape {}, stride {}, offset {}".format(*shape),
                found="shape {}, stride {}, offset {}".format(*found),
            )


def storage_bytes(params: Mapping[str, torch.Tensor], storages: Sequence[str]) -> list[torch.Tensor]:
    """The whole storages of these names as bytes: u8, 1-D, and the params' own memory. Raises RefusedError for one that
    is gone.
    """
    missing = next((name for name in storages if name not in params), None)
    if missing is not None:
        raise RefusedError(f"parameter `{missing}` is gone")
    return [
        torch.empty(0, dtype=torch.uint8, device=params[name].device).set_(params[name].untyped_storage())
        for name in storages
    ]


def find_unmapped(layout: LayoutMap, model: torch.nn.Module) -> list[str]:
    """Tensors of the model, in params, buffers or plain attributes, that share no storage with the map's params: caches
    and tables, or copies that the engine has derived from params. The latter need a registered function.
    """
    mapped = {storage.data_ptr for storage in layout.storages.values() if storage.data_ptr}
    names = (
        name for name, tensor in iterate_attributes(model) if tensor.numel() and _bound(tensor).data_ptr not in mapped
    )
    return list(dict.fromkeys(names))


def _problems(
    layout: LayoutMap,
    params: Mapping[str, torch.Tensor],
    forms: Mapping[str, ParamForm],
    storages: Mapping[str, StorageForm],
) -> Iterator[tuple[str, str]]:
    """Storages that placements must not be applied to, and why."""
    for name, form in layout.params.items():
        found = forms.get(name)
        if found is None:
            yield form.storage, f"parameter `{name}` is gone since the trace"
        elif found.dtype != form.dtype:
            yield form.storage, f"parameter `{name}` has become {found.dtype}, it was {form.dtype}"
        elif _steps(found) != _steps(form):
            yield form.storage, f"parameter `{name}` has another shape: {_view(found)}, it was {_view(form)}"
        elif storages[found.storage].nbytes != layout.storages[form.storage].nbytes:
            yield form.storage, f"the storage of parameter `{name}` has another size"
        elif params[name].numel() and not _bound(params[name]).data_ptr:
            yield form.storage, f"parameter `{name}` has no memory"
    sharing: dict[str, set[str]] = {}
    for name, form in layout.params.items():
        if name in forms:
            sharing.setdefault(form.storage, set()).add(forms[name].storage)
    users: dict[int, str] = {}
    for storage, now in sharing.items():
        if len(now) > 1:
            yield storage, f"parameters that shared the storage of `{storage}` do so no longer"
        for found_storage in now:
            key = storage_key(params[found_storage])
            other = users.setdefault(key, storage)
            if other != storage:
                reason = f"parameters `{other}` and `{storage}` have come to share a storage"
                yield from ((other, reason), (storage, reason))


def _steps(form: ParamForm) -> tuple[int, list[tuple[int, int]]]:
    """What a transpose leaves as it is: a view's offset, and its dimensions in any order."""
    return form.offset, sorted((step, size) for step, size in zip(form.stride, form.shape, strict=True) if size != 1)


def _view(form: ParamForm) -> str:
    return f"{list(form.shape)} with strides {list(form.stride)} from {form.offset}"


def _bound(tensor: torch.Tensor) -> StorageForm:
    storage = tensor.untyped_storage()
    return StorageForm(nbytes=storage.nbytes(), data_ptr=storage.data_ptr(), device=str(tensor.device))


def _address(storage: StorageForm) -> str:
    where = "no memory" if not storage.data_ptr else f"{storage.data_ptr:#x}"
    return f"{storage.nbytes} bytes at {where} on {storage.device}"
