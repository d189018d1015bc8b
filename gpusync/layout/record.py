"""What came of running a loader: plain data, written by the recorder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpusync.layout.placement import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write to a storage. `tensor` is None where the elements are not the checkpoint's, or nobody can say which:
    then `piece` only says where.
    """

    tensor: str | None
    piece: Piece
    operation: str


@dataclass(slots=True)
class Record:
    """The writes to each storage, in order, and why tensors are opaque."""

    writes: dict[str, list[Write]] = field(default_factory=dict)
    opaque: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            reasons = self.opaque.setdefault(name, [])
            if reason not in reasons:
                reasons.append(reason)
