"""Attach: from an engine's process group, or from none, to a `Group` that is connected and may work together."""

from __future__ import annotations

import importlib.metadata
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpusync.verdict.alone import AloneGroup
from gpusync.verdict.bounded import Deadline
from gpusync.verdict.errors import HandshakeError
from gpusync.verdict.group import Group
from gpusync.verdict.handshake import Fact, Hello
from gpusync.verdict.hosts import HostIdentity, this_host, this_process
from gpusync.verdict.members import Members

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open_group(
    group: ProcessGroup | Members | None,
    *,
    local_checkpoint_dir: str | os.PathLike[str],
    timeout_s: float,
    capabilities: Mapping[str, Fact] | None = None,
    details: Mapping[str, Fact] | None = None,
    problem: str | None = None,
    version: str | None = None,
    host: HostIdentity | None = None,
    store_host: str | None = None,
) -> Group:
    """gpusync's own group of the ranks of `group`; None is this process alone. Every rank has to call it.

    Nothing is started on the engine's group; only the address of the new store goes through the store behind it.
    `capabilities` must be the same on all ranks, and so must `version` (this package's by default); `details` need
    not. A rank that cannot take part comes with a `problem`. `host` stands for this host and `local_checkpoint_dir`.
    `store_host` is the address at which rank 0 serves, if it is not the one that leads to the engine's own store.

    If it fails, every rank that came raises GroupFailedError with the same reason within `timeout_s` and a few
    seconds: HandshakeError naming the ranks that may not work together, otherwise `missing` names who did not come.
    Then gpusync stays off, and the engine can serve. The caller closes the group.
    """
    mine = this_host(local_checkpoint_dir) if host is None else host
    if group is None:
        if problem is not None:
            raise HandshakeError(problem)
        return AloneGroup(mine)
    # torch waits until there is a group.
    from gpusync.verdict.generation import connect_generation
    from gpusync.verdict.ranks import RankGroup
    from gpusync.verdict.rendezvous import open_meeting_point
    from gpusync.verdict.seat import take_seat

    hello = Hello(
        nonce=uuid.uuid4().hex,
        version=_own_version() if version is None else version,
        host=mine,
        process=this_process(),
        capabilities=dict(capabilities or {}),
        details=dict(details or {}),
        problem=problem,
    )
    deadline = Deadline(timeout_s)
    seat, roster = take_seat(open_meeting_point(group, store_host=store_host), hello, deadline=deadline)
    try:
        roster.check()
        generation = connect_generation(seat.address, roster, rank=seat.rank, deadline=deadline)
    except BaseException:
        seat.leave(roster)
        raise
    return RankGroup(seat, hello, generation)


def _own_version() -> str:
    try:
        return importlib.metadata.version("gpusync")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
