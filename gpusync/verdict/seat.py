"""A rank's place at the group's store: the connection to it and, on rank 0, the store itself."""

from __future__ import annotations

import contextlib
import time
import uuid
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gpusync.verdict.bounded import Deadline
from gpusync.verdict.errors import GroupFailedError, StoreLostError
from gpusync.verdict.handshake import Hello, Roster
from gpusync.verdict.link import ATTACH_KEY, Address, StoreLink, serve_store
from gpusync.verdict.muster import MovedError, join_muster, lead_muster
from gpusync.verdict.rendezvous import MeetingPoint

_POLL_S = 0.05
_LEAVE_S = 3.0


class Seat:
    def __init__(self, *, rank: int, link: StoreLink, server: TCPStore | None) -> None:
        self.rank = rank
        self.link = link
        self._server = server

    @property
    def address(self) -> Address:
        return self.link.address

    def leave(self, roster: Roster | None) -> None:
        """Rank 0 waits a little for the other members of `roster`: who still reads a decision needs the store."""
        nonces = [] if roster is None else [None if hello is None else hello.nonce for hello in roster.hellos]
        deadline = Deadline(_LEAVE_S)
        with contextlib.suppress(StoreLostError):
            if self._server is None and self.rank < len(nonces):
                self.link.replace(f"left/{nonces[self.rank]}", "1", deadline=Deadline(1.0))
            waiting = {nonce for nonce in nonces[1:] if nonce is not None} if self._server is not None else set()
            while waiting and not deadline.expired:
                waiting = {nonce for nonce in waiting if self.link.read(f"left/{nonce}", deadline=deadline) is None}
                time.sleep(_POLL_S if waiting else 0)
        self.link.close()
        self._server = None


def take_seat(meeting: MeetingPoint, hello: Hello, *, deadline: Deadline) -> tuple[Seat, Roster]:
    """Serve the store or find it, and muster. A new attach; the roster's `check` is the caller's.

    Raises GroupFailedError naming who did not come.
    """
    return _serve(meeting, hello, deadline) if meeting.rank == 0 else _join(meeting, hello, deadline)


def _serve(meeting: MeetingPoint, hello: Hello, deadline: Deadline) -> tuple[Seat, Roster]:
    server, address = serve_store(*meeting.serve_at)
    link = StoreLink(address)
    try:
        server.set(ATTACH_KEY, uuid.uuid4().hex)
        meeting.announce(address)
        roster = lead_muster(link, hello, size=meeting.size, deadline=deadline)
    except BaseException:
        link.close()
        raise
    return Seat(rank=0, link=link, server=server), roster


def _join(meeting: MeetingPoint, hello: Hello, deadline: Deadline) -> tuple[Seat, Roster]:
    problem = f"rank 0 has announced no store within {deadline.timeout_s:.3g} s"
    while not deadline.expired:
        address = meeting.look()
        if address is not None:
            link = StoreLink(address)
            try:
                roster = join_muster(
                    link,
                    hello,
                    rank=meeting.rank,
                    size=meeting.size,
                    deadline=deadline,
                    # The address found first may be that of an earlier attach.
                    has_moved=partial(_has_moved, meeting, address),
                )
            except (StoreLostError, MovedError) as error:
                link.close()
                problem = str(error)
            except BaseException:
                link.close()
                raise
            else:
                return Seat(rank=meeting.rank, link=link, server=None), roster
        time.sleep(_POLL_S)
    raise GroupFailedError(problem, missing=(0,))


def _has_moved(meeting: MeetingPoint, address: Address) -> bool:
    return meeting.look() != address
