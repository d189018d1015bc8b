"""What the environment says, with what only vLLM asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from gpusync.engines import settings
from gpusync.errors import RefusedError

Pause = Literal["keep", "wait", "abort"]
PAUSES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(settings.Settings):
    """`pause`: what becomes, at a commit, of requests that run."""

    pause: Pause = "keep"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises RefusedError naming a variable that cannot be used."""
    pause = environment.get("GPUSYNC_PAUSE") or "keep"
    if pause not in PAUSES:
        raise RefusedError("GPUSYNC_PAUSE is no way to pause", expected=" or ".join(PAUSES), found=pause)
    return Settings(**settings.read_fields(environment), pause=cast(Pause, pause))
