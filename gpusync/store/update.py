"""A verified update of a rank's weights as it waits for its commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpusync.digest import Traffic
from gpusync.report import Stopwatch
from gpusync.store.casts import PreparedCasts
from gpusync.store.compact import StepFiles
from gpusync.store.fingerprint import BoundFingerprints, Fingerprint
from gpusync.store.load import LoadedStep
from gpusync.store.operations import Operation
from gpusync.store.restore import OldBytes
from gpusync.store.tensor_update import TensorUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPart:
    """What tensors will hold here after the commit: fingerprints by position in `names`, of the `live` bytes."""

    names: tuple[str, ...]
    fingerprints: Mapping[int, Fingerprint]
    live: BoundFingerprints


@dataclass(slots=True, kw_only=True)
class PreparedUpdate:
    """A verified update that waits for its commit.

    `base` reads what was live before. `chains` hold what stays where the params are, by tensor number, in proportion to
    what changed. `streamed` tensors are loaded again from `files` in the commit, in bounded steps; `repaired` ones,
    whose live bytes were damaged, are first written whole. What a commit has begun and not finished is `begun`.
    """

    names: tuple[str, ...]
    updates: Mapping[str, TensorUpdate]
    files: StepFiles
    base: OldBytes | None = None
    chains: dict[int, list[LoadedStep]] = field(default_factory=dict)
    streamed: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    casts: PreparedCasts = field(default_factory=PreparedCasts)
    expected: list[ExpectedPart] = field(default_factory=list)
    lanes: list[list[Operation]] = field(default_factory=list)
    done: list[Operation] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    kept: list[Any] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    watch: Stopwatch = field(default_factory=Stopwatch)
    touched_bytes: int = 0
    streamed_bytes: int = 0

    @property
    def operations(self) -> list[Operation]:
        """The calls of a commit. Those of a lane follow each other; lanes have no tensor in common."""
        return [operation for lane in self.lanes for operation in lane]

    @property
    def replaced(self) -> list[str]:
        """Tensors whose old bytes are not to be had back from their steps."""
        return [name for name, update in self.updates.items() if any(step.replaces for step in update.steps)]

    def close(self) -> None:
        """Let go of the host's files."""
        self.files.close()
