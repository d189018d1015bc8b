"""Which rank is on which host, and who leads there. Pure, but for `this_host` and `this_process`.

A host is (boot id, resolved local directory): ranks that agree on both share files and page cache. The leader of a
group on a host is its lowest rank there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """`name` is for messages only and takes no part in comparisons."""

    boot_id: str
    local_dir: str
    name: str = field(default="", compare=False)


def this_host(local_checkpoint_dir: str | os.PathLike[str]) -> HostIdentity:
    """The host this process is on. Without a boot id (not Linux) the host's name stands for it."""
    name = socket.gethostname()
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot_id = name
    return HostIdentity(boot_id=boot_id, local_dir=os.path.realpath(local_checkpoint_dir), name=name)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host of every rank, by rank."""

    identities: tuple[HostIdentity, ...]

    @classmethod
    def of(cls, identities: Sequence[HostIdentity]) -> Hosts:
        return cls(tuple(identities))

    def leader_of(self, rank: int) -> int:
        """The lowest rank on the host that `rank` is on."""
        return self.identities.index(self.identities[rank])

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """All ranks on the host that `rank` is on, itself among them, ascending."""
        mine = self.identities[rank]
        return tuple(other for other, identity in enumerate(self.identities) if identity == mine)

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank per host, ascending."""
        return tuple(sorted({self.leader_of(rank) for rank in range(len(self.identities))}))

    @property
    def names(self) -> dict[int, str]:
        return {rank: identity.name for rank, identity in enumerate(self.identities)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, as others on the same machine can look it up. `start` tells it from a later one of the same number."""

    pid: int
    namespace: str
    start: str


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(pid=pid, namespace=_namespace(), start=(_stat(pid) or ("", ""))[1])


def is_gone(process: ProcessIdentity, *, host: HostIdentity, mine: HostIdentity) -> bool:
    """True if `process` is known to have ended. Of another machine or another pid namespace nothing is known."""
    if host.boot_id != mine.boot_id or process.namespace != _namespace() or not process.namespace:
        return False
    found = _stat(process.pid)
    return found is None or found[0] in "ZX" or found[1] != process.start


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """(state, start time) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
