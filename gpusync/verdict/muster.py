"""The ranks come together: at attach, and again whenever the group has to be rebuilt.

Every rank writes `hello/<generation>/<rank>` into the group's store. Rank 0, which serves the store, waits for all of
them and writes the `roster` of that generation; a rank is in when the roster holds its hello of this very attempt. If
somebody does not come, the roster says who, so that all who came learn the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from gpusync.verdict.bounded import Deadline
from gpusync.verdict.errors import GroupFailedError, StoreLostError
from gpusync.verdict.handshake import (
    Hello,
    Roster,
    encode_hello,
    encode_roster,
    find_disagreement,
    parse_hello,
    parse_roster,
)
from gpusync.verdict.link import StoreLink

ROSTER_KEY = "roster"
_POLL_S = (0.005, 0.05)
# Rank 0 may have begun to wait later than the others; they give it this long to say who did not come.
_PATIENCE_S = 2.0
_TRY_S = 1.0


class MovedError(Exception):
    """The store is served somewhere else by now."""


def lead_muster(link: StoreLink, hello: Hello, *, size: int, deadline: Deadline) -> Roster:
    """Rank 0's part. The roster of the next generation, as all who came will see it; its `check` is the caller's."""
    generation = _read_roster(link, deadline).generation + 1
    link.replace(_hello_key(generation, 0), encode_hello(hello), deadline=deadline)
    hellos = _await_hellos(link, generation, size=size, deadline=deadline)
    missing = tuple(rank for rank, hello in enumerate(hellos) if hello is None)
    roster = Roster(
        generation=generation,
        hellos=hellos,
        problem=_absence(missing, deadline) if missing else find_disagreement([h for h in hellos if h is not None]),
        missing=missing,
    )
    link.replace(ROSTER_KEY, encode_roster(roster), deadline=Deadline(_TRY_S))
    for rank in range(size):
        link.delete(_hello_key(generation, rank), deadline=Deadline(_TRY_S))
    return roster


def join_muster(
    link: StoreLink, hello: Hello, *, rank: int, size: int, deadline: Deadline, has_moved: Callable[[], bool]
) -> Roster:
    """The part of every other rank. As `lead_muster`.

    Raises MovedError when `has_moved` says so, StoreLostError, and GroupFailedError when rank 0 makes no roster.
    """
    patience = Deadline(deadline.left_s() + _PATIENCE_S)
    next_look = Deadline(_TRY_S)
    pause_s, longest_s = _POLL_S
    generation = 0
    while not patience.expired:
        roster = _read_roster(link, Deadline(_TRY_S))
        if hello.nonce in roster.nonces:
            return roster
        if roster.generation + 1 != generation:
            # For the first time, or because rank 0 has gone on without this rank.
            generation = roster.generation + 1
            link.replace(_hello_key(generation, rank), encode_hello(hello), deadline=Deadline(_TRY_S))
        if next_look.expired:
            next_look = Deadline(_TRY_S)
            if has_moved():
                raise MovedError("the store was moved while the ranks came together")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    missing = _find_missing(link, generation, size=size) or (0,)
    # Who is not there must not be on a later roster.
    with contextlib.suppress(StoreLostError):
        link.delete(_hello_key(generation, rank), deadline=Deadline(_TRY_S))
    raise GroupFailedError(_absence(missing, deadline), missing=missing)


def _read_roster(link: StoreLink, deadline: Deadline) -> Roster:
    text = link.read(ROSTER_KEY, deadline=deadline)
    return Roster(generation=0, hellos=()) if text is None else parse_roster(text)


def _await_hellos(link: StoreLink, generation: int, *, size: int, deadline: Deadline) -> tuple[Hello | None, ...]:
    """By rank; None for who did not come in time."""
    pause_s, longest_s = _POLL_S
    while True:
        texts = [link.read(_hello_key(generation, rank), deadline=deadline) for rank in range(size)]
        if None not in texts or deadline.expired:
            return tuple(None if text is None else parse_hello(text) for text in texts)
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(2 * pause_s, longest_s)


def _find_missing(link: StoreLink, generation: int, *, size: int) -> tuple[int, ...]:
    """Rank 0 made no roster. Its hello tells whether it came at all."""
    keys = {rank: _hello_key(generation, rank) for rank in range(size)}
    return tuple(rank for rank, key in keys.items() if link.read(key, deadline=Deadline(_TRY_S)) is None)


def _hello_key(generation: int, rank: int) -> str:
    # By generation, so that what somebody left who came in vain, and died, is not taken for his coming now.
    return f"hello/{generation}/{rank}"


def _absence(ranks: tuple[int, ...], deadline: Deadline) -> str:
    named = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"{named} did not come within {deadline.timeout_s:.3g} s"
