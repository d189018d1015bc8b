"""Killing a process at a named step of its work on a local directory.

A step's name says on which side of it and what it was ("after write model-00001-of-00002.safetensors"); with the count
of its occurrence it is the same point in every run of a deterministic action (one worker). "inside" a write half of the
bytes have been handed to the system, inside the removal of a tree one file is gone. Works for any picklable action that
goes through `gpusync.mirror.io`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gpusync
from gpusync.mirror import io


@dataclass(frozen=True)
class Pull:
    """`gpusync.pull`, in whatever process it is called."""

    local: Path
    base: Path
    source: Path
    target: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gpusync.PullReport:
        return gpusync.pull(
            local_checkpoint_dir=self.local,
            base_dir=self.base,
            source_dir=self.source,
            target_version=self.target,
            **{"workers": 1, "lock_timeout": 30.0, **self.options},
        )


@dataclass(frozen=True)
class Unsynced:
    """Run `action` without waiting for the disk: what a killed process wrote is there for the next one all the same."""

    action: Callable[[], Any]

    def __call__(self) -> Any:
        with mock.patch.object(os, "fsync", return_value=None):
            return self.action()


@dataclass(frozen=True)
class Point:
    """The `occurrence`-th time (from 1) that a step of this name is come to; `of` in all. Any step for the name ""."""

    name: str
    occurrence: int
    of: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.occurrence} of {self.of})" if self.of > 1 else self.name


@dataclass(frozen=True)
class PointsOf:
    """Run `action` undisturbed and return the points it passes, in order."""

    action: Callable[[], Any]
    directory: Path

    def __call__(self) -> list[Point]:
        seen: list[str] = []
        with io.observed(lambda event: seen.extend(_names(event, self.directory))):
            self.action()
        counts, so_far = Counter(seen), Counter[str]()
        points = []
        for name in seen:
            so_far[name] += 1
            points.append(Point(name, so_far[name], counts[name]))
        return points


@dataclass(frozen=True)
class KilledAt:
    """Run `action` until it comes to `point`; there the process kills itself."""

    action: Callable[[], Any]
    directory: Path
    point: Point

    def __call__(self) -> None:
        seen = Counter[str]()

        def observer(event: io.Event) -> None:
            for name in _names(event, self.directory):
                seen[name] += 1
                seen[""] += 1
                if self.point.name in (name, "") and seen[self.point.name] == self.point.occurrence:
                    if name.startswith("inside"):
                        _do_half(event)
                    os.kill(os.getpid(), signal.SIGKILL)

        with io.observed(observer):
            self.action()


def _names(event: io.Event, directory: Path) -> list[str]:
    """What the event is called. Before a step that can be cut in two comes a second name, for its inside."""
    what = f"{event.step} {_relative(event.path, directory)}"
    if event.to is not None:
        what += f" to {_relative(event.to, directory)}"
    if event.done:
        return [f"after {what}"]
    can_be_cut = len(event.data) > 1 or (event.step == "rmtree" and any(event.path.iterdir()))
    return [f"before {what}", *([f"inside {what}"] if can_be_cut else [])]


def _relative(path: Path, directory: Path) -> str:
    return os.path.relpath(path, directory)


def _do_half(event: io.Event) -> None:
    if event.step == "rmtree":
        next(path for path in event.path.iterdir() if path.is_file()).unlink()
        return
    fd = os.open(event.path, os.O_WRONLY)
    os.pwrite(fd, memoryview(event.data)[: len(event.data) // 2], event.offset)
    os.close(fd)
