"""The layout map: where every tensor of the checkpoint lives in this rank's params."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from gpusync.errors import LayoutError
from gpusync.layout.placement import Piece, Placement, PlacementClass
from gpusync.layout.segments import SegmentGroup, segment_groups
from gpusync.layout.targets import ParamForm, StorageForm
from gpusync_kernels.segments import SEGMENT, SegmentTable

FORMAT = 1
"""Of the map's JSON."""

KEPT_SEGMENTS = 16
"""The segments of a tensor in no more than this are made once."""

Record = TypeVar("Record")


class TensorForm(Protocol):
    """What a checkpoint's header says of a tensor: `stream`'s TensorSpec, TensorRange and StoredTensor are such."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A tensor of the checkpoint of which this rank holds nothing."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demotion:
    """A placement that does not hold for the params that serve, and why.

    `is_reordered`: what stands where the map has it is the same elements in another order.
    """

    tensor: str
    reason: str
    is_reordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSegments:
    """What `bind_casts` takes: `table` counts elements; destination j is the storage of name `storages[j]`, seen as
    `dst_dtypes[j]`; source i is the i-th tensor, seen as `src_dtypes[i]`.
    """

    table: SegmentTable
    storages: tuple[str, ...]
    dst_dtypes: tuple[str, ...]
    src_dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutMap:
    """Immutable. Every tensor of the checkpoint stands in `placements` or in `elsewhere`; `params` and `storages` are
    all of the model's, buffers among them.
    """

    placements: Mapping[str, Placement]
    elsewhere: Mapping[str, Elsewhere]
    params: Mapping[str, ParamForm]
    storages: Mapping[str, StorageForm]

    def bytes_by_class(self) -> dict[str, int]:
        """Owned bytes by the class of their placement, all four of them."""
        counted = {kind.value: 0 for kind in PlacementClass}
        for placement in self.placements.values():
            counted[placement.kind.value] += placement.owned_bytes
        return counted

    @cached_property
    def patched_storages(self) -> frozenset[str]:
        """Those that commits in place write."""
        patched = (placement for placement in self.placements.values() if placement.is_patched)
        return frozenset(piece.param for placement in patched for piece in placement.pieces)

    def untouched_bytes(self) -> dict[str, int]:
        """Bytes of each storage that no commit in place ever writes, where there are any: padding, what no checkpoint
        fills, what opaque tensors went to.
        """
        left = {name: storage.nbytes for name, storage in self.storages.items()}
        for placement in self.placements.values():
            for piece in placement.pieces if placement.is_patched else ():
                left[piece.param] -= piece.dst_bytes
        return {name: nbytes for name, nbytes in left.items() if nbytes}

    def derived_modules(self, tensors: Iterable[str]) -> list[str]:
        """The modules to recompute after these tensors have changed, each once, in order of the tensors."""
        derived = (self.placements[name] for name in tensors if name in self.placements)
        return list(dict.fromkeys(p.derives for p in derived if p.derives is not None and p.is_patched))

    def segments(self, tensors: Sequence[str]) -> tuple[SegmentTable, list[str]]:
        """One table, in bytes, of all that moves unchanged of these tensors: source i is the i-th of them, destination
        j the whole storage of the j-th name returned. Opaque tensors, replicas and those elsewhere have nothing.
        """
        storages = list(self.storages)
        number = {name: index for index, name in enumerate(storages)}
        groups = [(index, group) for index, group in self._groups(tensors) if group.converts is None]
        return _joined(groups, [number[group.param] for _, group in groups]), storages

    def casts(self, tensors: Sequence[str]) -> CastSegments:
        """The same of all that is converted, in elements."""
        groups, numbers = [], []
        targets: dict[tuple[str, str], int] = {}
        sources = [self._form_of(name).dtype for name in tensors]
        for index, group in self._groups(tensors):
            if group.converts is not None:
                groups.append((index, group))
                numbers.append(targets.setdefault((group.param, group.converts), len(targets)))
                # A loader may take the same bytes for another dtype; it does so with all of a tensor.
                sources[index] = group.dtype
        return CastSegments(
            table=_joined(groups, numbers),
            storages=tuple(param for param, _ in targets),
            dst_dtypes=tuple(dtype for _, dtype in targets),
            src_dtypes=tuple(sources),
        )

    def check_tensors(self, tensors: Mapping[str, TensorForm]) -> None:
        """Raises LayoutError unless these are exactly the tensors that were traced, in name, dtype and shape."""
        for name in [*self.placements, *self.elsewhere]:
            known = self._form_of(name)
            found = tensors.get(name)
            if found is None:
                raise LayoutError("tensor is missing", tensor=name, expected=_form(known), found="nothing")
            if (found.dtype, tuple(found.shape)) != (known.dtype, known.shape):
                raise LayoutError("tensor has another form", tensor=name, expected=_form(known), found=_form(found))
        for name in tensors:
            if name not in self.placements and name not in self.elsewhere:
                raise LayoutError("tensor has no placement", tensor=name, found=_form(tensors[name]))

    def demoted(self, demotions: Iterable[Demotion]) -> LayoutMap:
        """The map in which these tensors, and tensors that are replicas of them, are opaque."""
        reasons = {demotion.tensor: demotion.reason for demotion in demotions}
        placements = {}
        for name, placement in self.placements.items():
            reason = reasons.get(name)
            if reason is None and placement.replica_of in reasons:
                reason = f"`{placement.replica_of}`, of which it is a replica: {reasons[placement.replica_of]}"
            placements[name] = placement if reason is None else placement.demoted(reason)
        return replace(self, placements=placements)

    def _form_of(self, tensor: str) -> Placement | Elsewhere:
        return self.placements[tensor] if tensor in self.placements else self.elsewhere[tensor]

    def _groups(self, tensors: Sequence[str]) -> Iterator[tuple[int, SegmentGroup]]:
        for index, name in enumerate(tensors):
            for group in self._kept.get(name) or self._groups_of(name):
                yield index, group

    def _groups_of(self, tensor: str) -> Sequence[SegmentGroup]:
        placement = self.placements.get(tensor)
        if placement is None or not placement.is_patched:
            return ()
        groups = segment_groups(placement.pieces)
        if sum(len(group.table) for group in groups) <= KEPT_SEGMENTS:
            self._kept[tensor] = groups
        return groups

    @cached_property
    def _kept(self) -> dict[str, Sequence[SegmentGroup]]:
        """Of tensors in few segments, which were asked for before."""
        return {}

    def to_json(self) -> str:
        """Stable: equal maps give equal texts, and `from_json` gives the map back."""
        read = {
            "format": FORMAT,
            "placements": {
                name: {**_fields(placement), "pieces": [_fields(piece) for piece in placement.pieces]}
                for name, placement in self.placements.items()
            },
            "elsewhere": {name: _fields(each) for name, each in self.elsewhere.items()},
            "params": {name: _fields(each) for name, each in self.params.items()},
            "storages": {name: _fields(each) for name, each in self.storages.items()},
        }
        return json.dumps(read, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LayoutMap:
        """Raises LayoutError for a text that `to_json` has not written."""
        try:
            read = json.loads(text)
            if read["format"] != FORMAT:
                raise LayoutError("layout map has another format", expected=FORMAT, found=read["format"])
            return cls(
                placements=_records(read["placements"], _placement),
                elsewhere=_records(read["elsewhere"], lambda each: Elsewhere(**_tuples(each))),
                params=_records(read["params"], lambda each: ParamForm(**_tuples(each))),
                storages=_records(read["storages"], lambda each: StorageForm(**each)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"layout map cannot be read: {type(error).__name__}: {error}") from error


def _joined(groups: Sequence[tuple[int, SegmentGroup]], numbers: Sequence[int]) -> SegmentTable:
    """One table of groups, each with its source's number, that go to destinations of these numbers."""
    if not groups:
        return SegmentTable.concat([])
    rows = np.concatenate([group.table.rows for _, group in groups], dtype=SEGMENT)
    counts = [len(group.table) for _, group in groups]
    rows["src"], rows["dst"] = np.repeat([index for index, _ in groups], counts), np.repeat(numbers, counts)
    return SegmentTable(rows)


def _form(tensor: TensorForm | Placement | Elsewhere) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _fields(record: Any) -> dict[str, Any]:
    """As `asdict`, but a map of 18,000 tensors is not copied value by value."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _records(read: Mapping[str, Any], make: Callable[[dict[str, Any]], Record]) -> dict[str, Record]:
    return {name: make(each) for name, each in read.items()}


def _placement(read: dict[str, Any]) -> Placement:
    pieces = tuple(Piece(**_tuples(piece)) for piece in read.pop("pieces"))
    return Placement(pieces=pieces, kind=PlacementClass(read.pop("kind")), **_tuples(read))


def _tuples(read: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
