"""How an agent and its workers are set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MARGIN_S = 30.0  # what a worker's own time-out is waited beyond: its answer says more than ours


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """`timeout_s` ends every wait of a worker, `visibility_timeout_s` the one for a version that is not there yet."""

    model: Path
    tp: int = 1
    device: str = "auto"
    timeout_s: float = 600.0
    visibility_timeout_s: float = 60.0
    pre_read_hook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where updates come from, and where they are made durable."""

    source_dir: Path
    local_checkpoint_dir: Path
