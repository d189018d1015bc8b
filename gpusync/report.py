"""What a pull did, for people, for logs and for machines."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """One pull, from what to what and at what cost.

    `version_before` is None when the directory held no usable version. `seed` is "store" (the local files were
    continued), "full" or "base" (they were replaced, `reason` says why). `elements_changed` counts elements of the
    changed tensors' dtypes that differ from the local files; it is None when the checkpoint was replaced. `wire_bytes`
    are payload bytes read from the stream, `tensor_bytes` the bytes of the tensors that were made and digested,
    `spool_bytes` what was written ahead of the files. `unverified_tensors` counts tensors that were copied but that
    nobody publishes a checksum of. `seconds` are wall seconds by stage on one monotonic clock. `shared` is true when
    another process of this host had done the same pull and this is its report.
    """

    target_version: int
    version_before: int | None
    seed: str
    seed_version: int
    chain: tuple[int, ...]
    reason: str
    path: str = "disk"
    decoder: str = "host"
    tensors_changed: int = 0
    elements_changed: int | None = 0
    tensor_bytes: int = 0
    wire_bytes: int = 0
    spool_bytes: int = 0
    unverified_tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    shared: bool = False

    @property
    def changed(self) -> bool:
        """Whether the local files were touched."""
        return self.seed != "store" or self.tensors_changed > 0

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PullReport:
        told = json.loads(text)
        told["chain"] = tuple(told["chain"])
        return cls(**told)


class Stopwatch:
    """Wall seconds by stage on one monotonic clock: each lap is the time since the one before it."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._began = self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._laps, "total": time.monotonic() - self._began}
