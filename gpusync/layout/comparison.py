"""Live params held against a version that is known: which placements hold, and which version it is that serves.

Every byte is compared. A tensor is read in windows, so that memory stays bounded whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from gpusync.errors import LayoutError
from gpusync.layout.dtypes import TORCH_DTYPES, WORDS, element_width
from gpusync.layout.layout_map import Demotion, LayoutMap
from gpusync.layout.placement import Piece, Placement, PlacementClass
from gpusync.stream import ByteSource

Label = TypeVar("Label")

ReadTensor = Callable[[str], ByteSource]
"""A tensor's bytes in the version in question."""

WINDOW_BYTES = 4 << 20
"""Of a tensor, read and compared at a time. Host and device each hold a few times as much meanwhile."""


def compare(
    layout: LayoutMap,
    params: Mapping[str, torch.Tensor],
    read_tensor: ReadTensor,
    *,
    window_bytes: int = WINDOW_BYTES,
) -> list[Demotion]:
    """The placements that do not hold for that version, to be demoted: those whose live bytes are not what the map
    makes of it, and all others in the same storage.

    With them storages of which nothing can be told: an engine that has rearranged one param of a module may have done
    so with the others, and elements that are all the same look the same in any order.

    Raises LayoutError where a param is missing or too small for its pieces, or a tensor has another size there.
    """
    demotions = list(_judge(layout, params, read_tensor, window_bytes))
    differing = {each.tensor for each in demotions}
    doubted = {storage for name in differing for storage in _storages(layout.placements[name])}
    modules = {
        _module(storage)
        for storage in doubted.union(*map(_storages, (p for p in layout.placements.values() if _is_opaque(p))))
    }
    uniform = {
        storage
        for storage, patched in _patched_by_storage(layout).items()
        if _module(storage) in modules and _is_uniform(patched, params, window_bytes)
    }
    for name, placement in layout.placements.items():
        if name in differing or not placement.is_patched:
            continue
        if _storages(placement) & doubted:
            reason = "others of its parameter are not where they were loaded"
            demotions.append(Demotion(tensor=name, reason=reason))
        elif _storages(placement) & uniform:
            reason = "its elements are all the same, and others of its module are not where they were loaded"
            demotions.append(Demotion(tensor=name, reason=reason))
    return demotions


def identify(
    layout: LayoutMap,
    params: Mapping[str, torch.Tensor],
    candidates: Sequence[tuple[Label, ReadTensor]],
    *,
    window_bytes: int = WINDOW_BYTES,
) -> Label | None:
    """The label of the first of the candidates, (label, reader), whose bytes the live params are; None for no one's.

    A placement that differs is put up with where its storage holds that version's elements in another order: the engine
    has rearranged them since, and `compare` demotes it. Anything else that differs makes it another version: were it
    demoted, a version that leaves the tensor as it is would leave the wrong bytes. Opaque placements say nothing; if
    all are, no version is known. Errors as `compare`.
    """
    if not any(placement.is_patched and placement.owned_bytes for placement in layout.placements.values()):
        return None
    for label, read_tensor in candidates:
        judged = _judge(layout, params, read_tensor, window_bytes)
        # Of replicas the last loaded tells.
        if all(each.is_reordered or layout.placements[each.tensor].replica_of is not None for each in judged):
            return label
    return None


def _judge(
    layout: LayoutMap, params: Mapping[str, torch.Tensor], read_tensor: ReadTensor, window_bytes: int
) -> Iterator[Demotion]:
    version = _Version(layout, read_tensor, window_bytes)
    for name, placement in layout.placements.items():
        if _is_opaque(placement):
            continue
        reason = next(version.differences(placement, params), None)
        if reason is None:
            continue
        if placement.replica_of is not None:
            yield Demotion(
                tensor=name, reason=f"`{placement.replica_of}`, loaded over it, has other elements: {reason}"
            )
            continue
        reordered = all(version.is_reordered(storage, params) for storage in _storages(placement))
        how = "are in another order" if reordered else "differ"
        yield Demotion(tensor=name, reason=f"live elements {how} since the load: {reason}", is_reordered=reordered)


class _Version:
    """What the map makes of one version, window by window."""

    def __init__(self, layout: LayoutMap, read_tensor: ReadTensor, window_bytes: int) -> None:
        self._patched = _patched_by_storage(layout)
        self._read_tensor = read_tensor
        self._window_bytes = window_bytes
        self._reordered: dict[str, bool] = {}

    def differences(self, placement: Placement, params: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Texts of where live elements are not the version's, at most one per window."""
        for piece, expected in self._expected(placement, placement.pieces):
            found = _live_words(piece, params)
            if not torch.equal(found, expected.to(found.device)):
                yield _first_difference(piece, found.cpu(), expected)

    def is_reordered(self, storage: str, params: Mapping[str, torch.Tensor]) -> bool:
        """True where all placements in a storage together hold that version's elements, in whatever order."""
        if storage not in self._reordered:
            surplus = 0
            for placement, pieces in self._patched.get(storage, ()):
                for piece, expected in self._expected(placement, pieces):
                    surplus += _order_free_sum(_live_words(piece, params)) - _order_free_sum(expected)
            self._reordered[storage] = surplus % (1 << 64) == 0
        return self._reordered[storage]

    def _expected(self, placement: Placement, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """These pieces of a placement in parts of a window at most, each with the words it should hold, on the host."""
        source = self._read_tensor(placement.tensor)
        if source.nbytes != placement.tensor_bytes:
            raise LayoutError(
                "tensor has another size", tensor=placement.tensor, expected=placement.tensor_bytes, found=source.nbytes
            )
        for whole in pieces:
            for piece in whole.within(self._window_bytes):
                if piece.numel:
                    yield piece, _converted(piece, _read(piece, source))


def _is_opaque(placement: Placement) -> bool:
    return placement.kind is PlacementClass.OPAQUE


def _storages(placement: Placement) -> set[str]:
    return {piece.param for piece in placement.pieces}


def _module(storage: str) -> str:
    return storage.rpartition(".")[0]


def _patched_by_storage(layout: LayoutMap) -> dict[str, list[tuple[Placement, list[Piece]]]]:
    """What placements have in each storage."""
    found: dict[str, list[tuple[Placement, list[Piece]]]] = {}
    for placement in layout.placements.values():
        for storage in sorted(_storages(placement)) if placement.is_patched else ():
            pieces = [piece for piece in placement.pieces if piece.param == storage]
            found.setdefault(storage, []).append((placement, pieces))
    return found


def _is_uniform(
    patched: Iterable[tuple[Placement, Sequence[Piece]]], params: Mapping[str, torch.Tensor], window_bytes: int
) -> bool:
    """True where the elements that placements have in a storage, more than one, are all the same."""
    whole = [piece for _, pieces in patched for piece in pieces]
    parts = [part for piece in whole for part in piece.within(window_bytes) if part.numel]
    if sum(part.numel for part in parts) < 2:
        return False
    first = _live_words(parts[0], params).flatten()[0]
    return all(bool((_live_words(part, params) == first).all()) for part in parts)


def _live_words(piece: Piece, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The live elements of a piece, as words of their width."""
    tensor = params.get(piece.param)
    found = 0 if tensor is None else tensor.untyped_storage().nbytes()
    if tensor is None or piece.dst_span[1] > found:
        raise LayoutError(f"parameter `{piece.param}` is too small", expected=piece.dst_span[1], found=found)
    words = torch.empty(0, dtype=WORDS[element_width(piece.dst_dtype)], device=tensor.device)
    return words.set_(tensor.untyped_storage()).as_strided(piece.size, piece.dst_stride, piece.dst_offset)


def _read(piece: Piece, source: ByteSource) -> torch.Tensor:
    """The source elements of a piece, as words of their width."""
    start, stop = piece.src_span
    window = np.empty(stop - start, np.uint8)
    source.read_into(start, window)
    words = torch.from_numpy(window).view(WORDS[element_width(piece.dtype)])
    return words.as_strided(piece.size, piece.src_stride)


def _converted(piece: Piece, words: torch.Tensor) -> torch.Tensor:
    """As the loader's copy converts them."""
    if piece.converts is None:
        return words
    target = TORCH_DTYPES[piece.converts]
    return words.contiguous().view(TORCH_DTYPES[piece.dtype]).to(target).view(WORDS[target.itemsize])


def _first_difference(piece: Piece, found: torch.Tensor, expected: torch.Tensor) -> str:
    differs = (found != expected).flatten()
    at = int(differs.nonzero()[0])
    index = np.unravel_index(at, piece.size) if piece.size else ()
    element = piece.dst_offset + sum(int(i) * step for i, step in zip(index, piece.dst_stride, strict=True))
    words = [int(each.flatten()[at]) & ((1 << 8 * each.element_size()) - 1) for each in (expected, found)]
    return f"element {element} of `{piece.param}` is {words[1]:#x}, expected {words[0]:#x}"


def _order_free_sum(words: torch.Tensor) -> int:
    """The same for any order of the words, modulo 2**64; the words are mixed first, so that others hardly give it."""
    total = 0
    for part in torch.split(words.reshape(-1), 1 << 20):
        mixed = (part.to(torch.int64) + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        total += int((mixed ^ (mixed >> 32)).sum())
    return total
