"""Folding behind: a thread that folds what the inbox has accepted, itself or through a helper process."""

from __future__ import annotations

import logging
import threading

from gpusync.beside import beside_serving
from gpusync.errors import MirrorError
from gpusync.helper import HelperEndedError, HelperProcess
from gpusync.mirror.inbox import read_inbox
from gpusync.mirror.pending import FoldJob
from gpusync.mirror.state import CONTROL_DIRECTORY

LOG = logging.getLogger(__name__)


class FoldsBehind:
    """Runs `job` at every `wake` that finds something pending. An error waits for `raise_error`, after which the fold
    is tried again. `last_error`: why the last one failed."""

    def __init__(self, job: FoldJob, *, in_process: bool) -> None:
        self._job, self._control = job, job.path / CONTROL_DIRECTORY
        self._helper = None if in_process else HelperProcess("folds")
        self._error: Exception | None = None
        self.last_error: str | None = None
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gpusync-mirror", daemon=True)
        self._thread.start()
        self.wake()

    @property
    def helper_pid(self) -> int | None:
        """Of the helper process, while there is one."""
        return None if self._helper is None else self._helper.pid

    def wake(self) -> None:
        """There may be something to fold."""
        self._wake.set()

    def raise_error(self) -> None:
        """What the thread met since the last call, as a MirrorError."""
        error, self._error = self._error, None
        if error is not None:
            self.wake()
            raise MirrorError(f"a fold behind failed: {error}", path=self._job.path) from error

    def close(self) -> None:
        """Stop after the fold it is at."""
        self._closed = True
        self.wake()
        self._thread.join()
        if self._helper is not None:
            self._helper.close()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            try:
                self._fold()
            # The thread has nobody to raise to: whatever went wrong is kept for the next call.
            except Exception as error:  # noqa: BLE001
                LOG.warning("fold into %s failed: %s", self._job.path, error)
                self._error, self.last_error = error, str(error)
            else:
                self.last_error = None

    def _fold(self) -> None:
        if not read_inbox(self._control).pending:
            return
        if self._helper is None:
            with beside_serving():
                self._job.run()
            return
        try:
            self._helper.run(self._job)
        except HelperEndedError as error:  # as a crash would: the next fold makes it good
            LOG.warning("fold into %s is begun again: %s", self._job.path, error)
            self._helper.run(self._job)
