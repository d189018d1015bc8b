"""Decoding for the leader of a host, as a job of its helper: the compact file and the updates lie in files then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusync.store.leader import Place, decode_chain
from gpusync.store.tensor_update import write_updates

COMPACT_FILE, UPDATES_FILE = "compact", "updates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    wire_bytes: int
    compact_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Decode `places` into files of `directory`: `COMPACT_FILE` and `UPDATES_FILE`."""

    places: Sequence[Place]
    base_dir: Path
    directory: Path
    workers: int

    def run(self) -> DecodeStats:
        """Raises as `decode_chain`."""
        decoded = decode_chain(self.places, self.base_dir, self.directory / COMPACT_FILE, workers=self.workers)
        write_updates(self.directory / UPDATES_FILE, decoded.updates)
        return DecodeStats(wire_bytes=decoded.wire_bytes, compact_bytes=decoded.compact_bytes)
