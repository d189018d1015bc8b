"""How an agent and its workers are set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MARGIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """`timeout_s` ends every wait of a worker, `visibility_timeout_s` the one for a version that is not there yet."""

    model: Path
    tp: int = 1
    device: str = "auto"
    timeout_s: float = 600.0
    visibility_timeout_s: float = 60.0
    pre_read_hook: str | None = None

    @property
    def answer_timeout_s(self) -> float:
        """How long a worker is waited for: beyond its own time-out, since its answer says more than ours."""
        return self.timeout_s + min(MARGIN_S, self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where updates come from, and where they are made durable."""

    source_dir: Path
    local_checkpoint_dir: Path
