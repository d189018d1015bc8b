"""A pre-read hook on a filesystem that is dead: it never comes back."""

from __future__ import annotations

import time


def hang(source_dir: str, target_version: int) -> None:
    time.sleep(3600)
