"""Verified weight synchronisation from RL trainers to LLM inference engines.

`Publisher` publishes versions. `pull` brings a host-local checkpoint to one, `Mirror` does so behind; `WeightSync`
brings the live weights of a rank to one, in place. `Fleet` brings several engines to one, over HTTP.
What only one of them needs is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpusync.errors import GpusyncError

if TYPE_CHECKING:
    from gpusync.disk import pull
    from gpusync.endpoint.fleet import Fleet
    from gpusync.mirror.mirror import Mirror
    from gpusync.publish import CheckpointTensors, Publisher, PublishReport, StoredBytes
    from gpusync.report import PullReport
    from gpusync.sync import WeightSync

__all__ = [
    "CheckpointTensors",
    "Fleet",
    "GpusyncError",
    "Mirror",
    "PublishReport",
    "Publisher",
    "PullReport",
    "StoredBytes",
    "WeightSync",
    "pull",
]

_HOMES = {
    "CheckpointTensors": "gpusync.publish",
    "Fleet": "gpusync.endpoint.fleet",
    "Mirror": "gpusync.mirror.mirror",
    "PublishReport": "gpusync.publish",
    "Publisher": "gpusync.publish",
    "PullReport": "gpusync.report",
    "StoredBytes": "gpusync.publish",
    "WeightSync": "gpusync.sync",
    "pull": "gpusync.disk",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"gpusync.{name} needs torch, which is not installed", name="torch") from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
