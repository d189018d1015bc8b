"""What the environment says to a plugin: flags of ours would not reach servers that somebody else starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusync.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`source_roots` and `local_roots`: below which directories requests may name a stream and a local checkpoint."""

    source_roots: tuple[Path, ...] = (Path("/"),)
    local_roots: tuple[Path, ...] = (Path("/"),)
    source_dir: str | None = None
    local_checkpoint_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    pre_read_hook: str | None = None
    timeout_s: float = 600.0
    visibility_timeout_s: float = 60.0
    handshake_timeout_s: float = 60.0


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises RefusedError naming a variable that cannot be used."""
    return Settings(**read_fields(environment))


def read_fields(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `Settings`, by name. Raises as `read_settings`."""
    told = {name.removeprefix("GPUSYNC_"): value for name, value in environment.items() if value}
    return {
        "source_roots": _roots(told, "SOURCE_ROOTS"),
        "local_roots": _roots(told, "LOCAL_ROOTS"),
        "source_dir": told.get("SOURCE_DIR"),
        "local_checkpoint_dir": told.get("LOCAL_CHECKPOINT_DIR"),
        "token": told.get("TOKEN"),
        "pre_read_hook": told.get("PRE_READ_HOOK"),
        "timeout_s": _seconds(told, "TIMEOUT_S", 600.0),
        "visibility_timeout_s": _seconds(told, "VISIBILITY_TIMEOUT_S", 60.0),
        "handshake_timeout_s": _seconds(told, "HANDSHAKE_TIMEOUT_S", 60.0),
    }


def _roots(told: Mapping[str, str], name: str) -> tuple[Path, ...]:
    paths = tuple(Path(each) for each in told.get(name, "/").split(os.pathsep) if each)
    if not all(path.is_absolute() for path in paths):
        raise RefusedError(f"GPUSYNC_{name} names a directory that is not absolute", found=told[name])
    return paths


def _seconds(told: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(told.get(name, default))
    except ValueError as error:
        raise RefusedError(f"GPUSYNC_{name} is no number of seconds", found=told[name]) from error
