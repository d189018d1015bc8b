"""A real filesystem that is full or read-only: a small tmpfs, in a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusync.errors import MirrorError
from support.checkpoints import changed, tensor, write_checkpoint
from support.fork_server import ForkServer
from support.kill import Pull
from support.slime import publish_delta
from support.streams import Stream

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 0x4000, 0x40000


@dataclass(frozen=True)
class OnTmpfs:
    """In a mount namespace of its own: pulls in a tmpfs that is too small, or read-only, and again when it is not.

    Returns None where mounting is not allowed, else the texts of the errors.
    """

    place: Path
    start: Path
    pull: Pull
    spare: tuple[int, ...]

    def __call__(self) -> list[str] | None:
        if not enter_namespace() or not mount("tmpfs", self.place, 0, "size=64m"):
            return None
        local = self.place / "local"
        pull = replace(self.pull, local=local)
        return [*self._too_small(pull, local), self._read_only(pull, local)]

    def _too_small(self, pull: Pull, local: Path) -> Iterator[str]:
        filler = self.place / "filler"
        for spare in self.spare:
            shutil.rmtree(local, ignore_errors=True)
            shutil.copytree(self.start, local)
            free = shutil.disk_usage(self.place).free
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - spare)
            yield failure_of(pull)
            filler.unlink()
            pull()

    def _read_only(self, pull: Pull, local: Path) -> str:
        shutil.rmtree(local)
        shutil.copytree(self.start, local)
        mount("tmpfs", self.place, MS_REMOUNT | MS_RDONLY, "")
        text = failure_of(pull)
        mount("tmpfs", self.place, MS_REMOUNT, "")
        pull()
        return text


def failure_of(pull: Pull) -> str:
    try:
        pull()
    except MirrorError as error:
        return f"{error} | {error.expected} | {error.found}"
    return ""


def enter_namespace() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = CLONE_NEWNS if os.getuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(flags) != 0:
        return False
    try:
        if flags & CLONE_NEWUSER:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    return mount("none", Path("/"), MS_REC | MS_PRIVATE, "")


def mount(kind: str, place: Path, flags: int, options: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    where: list[Any] = [kind.encode(), os.fsencode(place), kind.encode(), flags, options.encode()]
    return bool(libc.mount(*where) == 0)


def test_a_real_tmpfs_that_is_full_or_read_only(processes: ForkServer, tmp_path: Path) -> None:
    """Room for nothing at all, for a part of the spools, and for nearly everything."""
    rng = np.random.default_rng(1)
    states = [{name: tensor(rng, "BF16", 500, 500) for name in ("a", "b", "c", "d")}]
    base, source = write_checkpoint(tmp_path / "base", states[0]), tmp_path / "stream"
    for version in (1, 2):
        states.append(changed(states[-1], version, share=0.9))
        publish_delta(source, version, states[-2], states[-1])
    stream = Stream(base, source, states)
    stream.pull(tmp_path / "start", 1)()
    (place := tmp_path / "mounted").mkdir()
    spare = (0, 4096, 300_000, 1_000_000, 1_990_000)
    ended = processes.run(OnTmpfs(place, tmp_path / "start", stream.pull(place, 2), spare))
    assert ended.error is None, ended.error
    if ended.value is None:
        pytest.skip("mounting a tmpfs is not allowed here")
    *full, read_only = ended.value
    assert len(full) == len(spare)
    for text, room in zip(full, spare, strict=True):
        assert "No space left on device" in text, f"with {room} bytes to spare: {text}"
        assert "room for " in text
    assert "Read-only file system" in read_only
