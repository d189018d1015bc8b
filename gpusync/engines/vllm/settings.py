"""What the environment says: vLLM has no place for flags of others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from gpusync.errors import RefusedError

Pause = Literal["keep", "wait", "abort"]
PAUSES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`source_roots` and `local_roots`: below which directories requests may name a stream and a local checkpoint.
    `pause`: what becomes, at a commit, of requests that run."""

    source_roots: tuple[Path, ...] = (Path("/"),)
    local_roots: tuple[Path, ...] = (Path("/"),)
    source_dir: str | None = None
    local_checkpoint_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    pre_read_hook: str | None = None
    pause: Pause = "keep"
    timeout_s: float = 600.0
    visibility_timeout_s: float = 60.0
    handshake_timeout_s: float = 60.0


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises RefusedError naming a variable that cannot be used."""
    told = {name.removeprefix("GPUSYNC_"): value for name, value in environment.items() if value}
    return Settings(
        source_roots=_roots(told, "SOURCE_ROOTS"),
        local_roots=_roots(told, "LOCAL_ROOTS"),
        source_dir=told.get("SOURCE_DIR"),
        local_checkpoint_dir=told.get("LOCAL_CHECKPOINT_DIR"),
        token=told.get("TOKEN"),
        pre_read_hook=told.get("PRE_READ_HOOK"),
        pause=_pause(told),
        timeout_s=_seconds(told, "TIMEOUT_S", 600.0),
        visibility_timeout_s=_seconds(told, "VISIBILITY_TIMEOUT_S", 60.0),
        handshake_timeout_s=_seconds(told, "HANDSHAKE_TIMEOUT_S", 60.0),
    )


def _roots(told: Mapping[str, str], name: str) -> tuple[Path, ...]:
    paths = tuple(Path(each) for each in told.get(name, "/").split(os.pathsep) if each)
    if not all(path.is_absolute() for path in paths):
        raise RefusedError(f"GPUSYNC_{name} names a directory that is not absolute", found=told[name])
    return paths


def _pause(told: Mapping[str, str]) -> Pause:
    pause = told.get("PAUSE", "keep")
    if pause not in PAUSES:
        raise RefusedError("GPUSYNC_PAUSE is no way to pause", expected=" or ".join(PAUSES), found=pause)
    return cast(Pause, pause)


def _seconds(told: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(told.get(name, default))
    except ValueError as error:
        raise RefusedError(f"GPUSYNC_{name} is no number of seconds", found=told[name]) from error
