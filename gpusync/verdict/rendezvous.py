"""How the ranks find the group's store: rank 0 serves it somewhere, and the others have to learn where.

The address goes through the store behind the engine's process group, read and written like a notice board: no
collective is started on the engine's group. Where there is no such group, the address is given.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Protocol

from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    distributed_c10d,
)

from gpusync.verdict.bounded import LIBRARY_ERRORS, call_bounded
from gpusync.verdict.errors import GroupFailedError, first_line
from gpusync.verdict.link import Address
from gpusync.verdict.members import Members

_KEY = "gpusync/verdict/address"
_LOOK_S = 5.0


class MeetingPoint(Protocol):
    """Where the ranks of one group look for the store's address."""

    rank: int
    size: int

    @property
    def serve_at(self) -> tuple[str, int]:
        """(host, port) at which rank 0 is to serve; port 0 is any."""
        ...

    def announce(self, address: Address) -> None: ...

    def look(self) -> Address | None:
        """The newest announced address, which may be one of an earlier attach; None if there is none."""
        ...


class GivenAddress:
    def __init__(self, members: Members) -> None:
        self.rank, self.size = members.rank, members.size
        self._address = Address(host=members.host, port=members.port)

    @property
    def serve_at(self) -> tuple[str, int]:
        return self._address.host, self._address.port

    def announce(self, address: Address) -> None:
        pass

    def look(self) -> Address | None:
        return self._address


class EngineStore:
    """The store behind the engine's group, prefixed by torch with what is this group's own."""

    def __init__(self, group: ProcessGroup, *, store_host: str | None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._store = _store_of(group)
        self._store_host = store_host

    @property
    def serve_at(self) -> tuple[str, int]:
        return self._store_host or _address_towards(self._store), 0

    def announce(self, address: Address) -> None:
        text = json.dumps({"host": address.host, "port": address.port})
        self._bounded(lambda: self._store.set(_KEY, text))

    def look(self) -> Address | None:
        # `get` alone would wait for the key, and keep the engine out of its own store while it does.
        found = self._bounded(lambda: self._store.get(_KEY) if self._store.check([_KEY]) else None)
        if found is None:
            return None
        told = json.loads(found)
        return Address(host=str(told["host"]), port=int(told["port"]))

    def _bounded(self, work: Any) -> Any:
        try:
            return call_bounded(work, timeout_s=_LOOK_S, name="gpusync-engine-store")
        except LIBRARY_ERRORS as error:
            raise GroupFailedError(f"the store of the engine's process group fails: {first_line(error)}") from error


def open_meeting_point(group: ProcessGroup | Members, *, store_host: str | None) -> MeetingPoint:
    return GivenAddress(group) if isinstance(group, Members) else EngineStore(group, store_host=store_host)


def _store_of(group: ProcessGroup) -> Store:
    try:
        return distributed_c10d._get_process_group_store(group)
    except KeyError as error:
        raise GroupFailedError(
            "the process group is not one of torch.distributed's, so its store is not known: give Members instead"
        ) from error


def _address_towards(store: Store) -> str:
    """The address of this machine that a connection to the engine's store leaves from: the others, who reach that
    store, reach this address. With a store that is no TCPStore, all ranks are taken to be on this machine.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    try:
        family, _, _, _, there = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only chooses the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupFailedError(f"no route to the engine's store at {store.host}: {first_line(error)}") from error
