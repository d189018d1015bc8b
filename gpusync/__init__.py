"""Verified weight synchronisation from RL trainers to LLM inference engines.

`pull` brings a host-local checkpoint to a published version, `Mirror` does so behind; `Publisher` publishes versions.
What only one of them needs is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpusync.errors import GpusyncError

if TYPE_CHECKING:
    from gpusync.disk import pull
    from gpusync.mirror.mirror import Mirror
    from gpusync.publish import Publisher, PublishReport
    from gpusync.report import PullReport

__all__ = ["GpusyncError", "Mirror", "PublishReport", "Publisher", "PullReport", "pull"]

_HOMES = {
    "Mirror": "gpusync.mirror.mirror",
    "PublishReport": "gpusync.publish",
    "Publisher": "gpusync.publish",
    "PullReport": "gpusync.report",
    "pull": "gpusync.disk",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
