"""Tracing: an engine's own loader, given tensors without data, tells where everything goes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpusync.errors import LayoutError
from gpusync.layout.layout_map import Elsewhere, LayoutMap, TensorForm
from gpusync.layout.loader import LoadWeights, record_loader, torch_forms
from gpusync.layout.overlap import check_apart, find_overwritten, find_replicas, find_self_overlaps
from gpusync.layout.placement import Piece, Placement, PlacementClass
from gpusync.layout.record import Record
from gpusync.layout.registry import DERIVED, DerivedRegistry
from gpusync.layout.segments import count_segments
from gpusync.layout.targets import ModelState, ParamForm, named_tensors, read_forms

# Of one tensor: 64 MiB of segment table. What needs more than that is not worth patching in place.
MAX_SEGMENTS = 1 << 20


def trace(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    tensors: Mapping[str, TensorForm],
    *,
    derived: DerivedRegistry = DERIVED,
    is_twin: bool = False,
) -> LayoutMap:
    """The layout map of `model`, by its `load_weights(iterable of (name, tensor))`, for a checkpoint of these tensors.

    No write to a param or buffer is executed. The loader is run on a model that has not been loaded yet; on a twin of
    the engine's model, on the meta device or not (`is_twin`: what the loader does to it beside writing does not matter,
    and tensors that went into storages it has exchanged are opaque); or on a serving module whose loader only copies.

    Raises LayoutError where two tensors go to the same bytes, for a parameter without plain storage, and, unless it is
    a twin, when the loader has exchanged params, storages, shapes or strides: what the model held is put back then.
    """
    forms, refused = torch_forms(tensors.items())
    params, storages = read_forms(named_tensors(model))
    state = ModelState(model)
    try:
        record = record_loader(model, load_weights, forms)
    finally:
        changes = state.changes()
        if changes and not is_twin:
            state.restore()
    if changes and not is_twin:
        raise LayoutError(
            "the loader has exchanged parameters of a model that is no twin", expected="copies only", found=changes[0]
        )
    for name, reason in refused.items():
        record.refuse([name], reason)
    _refuse_exchanged(record, {params[name].storage for name in changes if name in params})
    find_overwritten(record)
    placements = _placements(record, tensors, derived.derived_params(model), params)
    return LayoutMap(
        placements=placements,
        elsewhere={
            name: Elsewhere(dtype=tensor.dtype, shape=tuple(tensor.shape), nbytes=tensor.nbytes)
            for name, tensor in tensors.items()
            if name not in placements
        },
        params=params,
        storages=storages,
    )


def _refuse_exchanged(record: Record, exchanged: set[str]) -> None:
    """What a loader has written to a storage that it exchanges is not where the map would have it."""
    for storage, writes in record.writes.items():
        if storage in exchanged:
            names = [write.tensor for write in writes if write.tensor is not None]
            record.refuse(names, f"the loader exchanges the storage of parameter `{storage}`")


def _placements(
    record: Record, tensors: Mapping[str, TensorForm], derived: Mapping[str, str], params: Mapping[str, ParamForm]
) -> dict[str, Placement]:
    """The placements of all tensors that this rank holds anything of, or may hold for all we know."""
    pieces = _pieces_by_tensor(record)
    for name in find_self_overlaps({name: each for name, each in pieces.items() if name not in record.opaque}):
        record.refuse([name], "the loader writes it twice to the same bytes")
    patched = {name: each for name, each in pieces.items() if name not in record.opaque}
    replicas = find_replicas(patched, _order(record))
    check_apart({name: each for name, each in patched.items() if name not in replicas})
    derives = {params[param].storage: module for param, module in derived.items() if param in params}
    return {
        name: _placement(name, tensor, pieces.get(name, ()), record, derives, replicas.get(name))
        for name, tensor in tensors.items()
        # A tensor without elements is held wherever one looks for it.
        if name in pieces or name in record.opaque or tensor.nbytes == 0
    }


def _pieces_by_tensor(record: Record) -> dict[str, tuple[Piece, ...]]:
    """Each piece once, though a loader may copy it more often. What needs too large a table is refused."""
    pieces: dict[str, dict[Piece, None]] = {}
    for writes in record.writes.values():
        for write in writes:
            if write.tensor is not None:
                pieces.setdefault(write.tensor, {})[write.piece] = None
    for name, each in pieces.items():
        count = sum(count_segments(piece) for piece in each)
        if count > MAX_SEGMENTS:
            record.refuse([name], f"it lies in {count} scattered parts, more than {MAX_SEGMENTS}")
    return {name: tuple(each) for name, each in pieces.items()}


def _order(record: Record) -> dict[str, int]:
    """When each tensor was last written, comparable among tensors of one storage."""
    return {
        write.tensor: place
        for writes in record.writes.values()
        for place, write in enumerate(writes)
        if write.tensor is not None
    }


def _placement(
    name: str,
    tensor: TensorForm,
    pieces: tuple[Piece, ...],
    record: Record,
    derives: Mapping[str, str],
    replica_of: str | None,
) -> Placement:
    reasons = record.opaque.get(name)
    module = next((derives[piece.param] for piece in pieces if piece.param in derives), None)
    kind = PlacementClass.DIRECT
    if reasons is not None:
        kind = PlacementClass.OPAQUE
    elif module is not None:
        kind = PlacementClass.DERIVED
    elif any(piece.converts is not None for piece in pieces):
        kind = PlacementClass.CAST
    return Placement(
        tensor=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        pieces=pieces,
        kind=kind,
        tensor_bytes=tensor.nbytes,
        reason=None if reasons is None else "; ".join(reasons),
        derives=module if kind is PlacementClass.DERIVED else None,
        replica_of=replica_of,
    )
