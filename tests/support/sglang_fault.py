"""A plugin of its own beside gpusync's: on rank `FAULT_RANK` of the server something goes wrong.

`FAULT` is "prepare" or "commit": the rank is killed with an update verified that is not accepted yet, or with new bytes
live that no other rank knows of; `FAULT_MARK` is a file that is written just before. "start": it cannot start gpusync.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: sglang-fault\nVersion: 0\n"
ENTRY_POINTS = "[sglang.srt.plugins]\nsglang_fault = sglang_fault:register\n"


def install(site: Path) -> None:
    """Into a directory on a server's path."""
    (site / "sglang_fault.py").write_text(Path(__file__).read_text())
    info = site / "sglang_fault-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    step = os.environ.get("FAULT")
    if step == "start":
        _fail_to_start()
    elif step is not None:
        _die_after(step)


def _is_here() -> bool:
    import torch

    return torch.distributed.get_rank() == int(os.environ["FAULT_RANK"])


def _fail_to_start() -> None:
    from gpusync.engines.sglang import start

    follow = start._follow

    def failing(*arguments, **options):
        if _is_here():
            raise MemoryError("this rank has no room")
        return follow(*arguments, **options)

    start._follow = failing


def _die_after(step: str) -> None:
    from gpusync.store.rank import RankStore

    original = getattr(RankStore, step)

    def dying(self, *arguments, **options):
        done = original(self, *arguments, **options)
        if _is_here():
            Path(os.environ["FAULT_MARK"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(RankStore, step, dying)
