"""Power losses: what may stand in a directory after the power failed at some step of the work on it.

A `Recorder` watches every step (`gpusync.mirror.io.observed`) and keeps a log; `disk_after` replays the log up to a
step into a `Disk` (`support.forgetful_disk`), which can tell what may be left.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from gpusync.mirror import io
from support.forgetful_disk import Disk, Logged

DATA_STEPS = ("write", "truncate")
IGNORED_STEPS = ("open",)


class PowerCut(BaseException):
    """The process stops here. Nothing catches this."""


class Recorder:
    """Logs the steps in `root`, and the reports that callers make between them (`report`).

    With `stop_at` the work is cut short by PowerCut at that step (counted from now; of the steps `only`, once they are
    done, if given), and at every further one: the process is gone, its page cache is not. `go_on` lets the next process
    work.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start = Disk.load(root)
        self.log: list[Logged] = []
        self.reports: list[tuple[int, object]] = []
        self._left: int | None = None
        self._only: Sequence[str] | None = None
        self._lock = threading.Lock()

    def __call__(self, event: io.Event) -> None:
        with self._lock:
            if self._left and (self._only is None or (event.done and event.step in self._only)):
                self._left -= 1
            stops = self._left == 0
            # a step that is stopped before it began has not happened; one that is done has
            counts = event.step not in IGNORED_STEPS and event.path.is_relative_to(self.root)
            if counts and (event.done or not stops):
                self.log.append(_logged(event))
            if stops:
                raise PowerCut

    def stop_at(self, step: int, *, only: Sequence[str] | None = None) -> None:
        self._left, self._only = step, only

    def go_on(self) -> None:
        self._left = None

    @property
    def stopped(self) -> bool:
        return self._left == 0

    def report(self, what: object) -> None:
        """`what` has been told to a caller: it must hold from here on."""
        self.reports.append((len(self.log), what))

    def disk_after(self, steps: int) -> Disk:
        """The disk when the power fails after the first `steps` logged steps, the last of them perhaps in progress."""
        disk = self.start.copy()
        for logged in self.log[:steps]:
            disk.take(logged, self.root)
        return disk


def _logged(event: io.Event) -> Logged:
    mtime_ns = event.path.stat().st_mtime_ns if event.done and event.step in DATA_STEPS else None
    return Logged(
        step=event.step,
        path=event.path,
        done=event.done,
        thread=threading.get_ident(),
        offset=event.offset,
        data=bytes(event.data),
        to=event.to,
        mtime_ns=mtime_ns,
    )
