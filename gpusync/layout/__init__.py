"""Placements: where each tensor of a checkpoint lives in a rank's params, traced from the engine's own loader."""

from gpusync.layout.binding import attach, check_addresses, find_unmapped, storage_bytes
from gpusync.layout.comparison import ReadTensor, compare, identify
from gpusync.layout.layout_map import CastSegments, Demotion, Elsewhere, LayoutMap, TensorForm
from gpusync.layout.placement import Piece, Placement, PlacementClass
from gpusync.layout.registry import DERIVED, Derivation, DerivedRegistry, register_derived
from gpusync.layout.segments import SegmentGroup, segment_groups
from gpusync.layout.targets import ParamForm, StorageForm, named_tensors
from gpusync.layout.tracing import trace

__all__ = [
    "DERIVED",
    "CastSegments",
    "Demotion",
    "Derivation",
    "DerivedRegistry",
    "Elsewhere",
    "LayoutMap",
    "ParamForm",
    "Piece",
    "Placement",
    "PlacementClass",
    "ReadTensor",
    "SegmentGroup",
    "StorageForm",
    "TensorForm",
    "attach",
    "check_addresses",
    "compare",
    "find_unmapped",
    "identify",
    "named_tensors",
    "register_derived",
    "segment_groups",
    "storage_bytes",
    "trace",
]
