"""The lock of a local directory: who waits learns for whom, and a dead holder holds nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from gpusync.errors import LockTimeoutError
from gpusync.mirror.lock import local_lock


def hold(control: Path, ready: multiprocessing.synchronize.Event) -> None:
    with local_lock(control, timeout_s=5):
        ready.set()
        signal.pause()


def test_the_message_names_the_other_process_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    control = tmp_path / ".weight_sync"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(control, ready))
    holder.start()
    try:
        assert ready.wait(60)
        with (
            pytest.raises(LockTimeoutError, match=rf"process {holder.pid} on .* since \d{{4}}-"),
            local_lock(control, timeout_s=0.1),
        ):
            pass
    finally:
        os.kill(int(holder.pid or 0), signal.SIGKILL)
        holder.join()
    with local_lock(control, timeout_s=5):
        pass


def test_a_lock_file_of_unknown_content_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("not json")
    with (
        local_lock(tmp_path, timeout_s=1),
        pytest.raises(LockTimeoutError),
        local_lock(tmp_path, timeout_s=0.1),
    ):
        pass
