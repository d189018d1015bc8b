"""This rank's connection to the group's own TCPStore, which rank 0 serves.

Every call has a deadline, connects again when the connection was cut, and ends in StoreLostError. All operations may
be repeated without harm, so that one whose answer was lost is simply done again.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gpusync.verdict.bounded import LIBRARY_ERRORS, Deadline, Worker
from gpusync.verdict.errors import GroupFailedError, StoreLostError, first_line

T = TypeVar("T")

ATTACH_KEY = "attach"
# No value is this text: comparing with it changes nothing, and answers with what is there, or with it if nothing is.
_NOTHING = "?"
_CONNECT_S = 5.0
_RETRY_S = (0.01, 0.5)
_LAST_TRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def serve_store(host: str, port: int = 0) -> tuple[TCPStore, Address]:
    """Serve a store at `host` only, on `port` or on a free one, for as long as the returned object lives.

    Raises GroupFailedError when the address is not this machine's or is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
            address = Address(host=host, port=listener.getsockname()[1])
            store = TCPStore(
                host,
                address.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_S),
                master_listen_fd=listener.detach(),
            )
    except LIBRARY_ERRORS as error:
        raise GroupFailedError(f"cannot serve a store at {host}:{port}: {first_line(error)}") from error
    return store, address


@dataclass(frozen=True, slots=True)
class _Connection:
    store: TCPStore
    worker: Worker


class StoreLink:
    """Not thread-safe: one call at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.attach_id: str | None = None
        # Why the store was not reached at the last call; None if it was.
        self.problem: str | None = None
        self._connection: _Connection | None = None

    def read(self, key: str, *, deadline: Deadline) -> str | None:
        """The value of `key`, None if it has none. Does not wait for it."""
        found = self._call(lambda store: store.compare_set(key, _NOTHING, _NOTHING), deadline)
        return None if found == _NOTHING.encode() else found.decode()

    def record(self, key: str, value: str, *, deadline: Deadline) -> str:
        """Set `key` unless it has a value, and return the one it has from now on: exactly one writer succeeds."""
        return self._call(lambda store: store.compare_set(key, "", value), deadline).decode()

    def replace(self, key: str, value: str, *, deadline: Deadline) -> None:
        """Set `key`. The store is known to have it when this returns, which `TCPStore.set` alone does not say."""

        def work(store: TCPStore) -> None:
            store.set(key, value)
            store.check([key])

        self._call(work, deadline)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        self._call(lambda store: store.delete_key(key), deadline)

    def count_keys(self, *, deadline: Deadline) -> int:
        return self._call(lambda store: store.num_keys(), deadline)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.worker.close()

    def _call(self, operation: Callable[[TCPStore], T], deadline: Deadline) -> T:
        """Tries at least once, even when the deadline has passed."""
        pause_s, longest_s = _RETRY_S
        while True:
            try:
                connection = self._connection or self._connect(deadline)
                timeout_s = max(deadline.left_s(), _LAST_TRY_S)
                answer = connection.worker.call(partial(operation, connection.store), timeout_s=timeout_s)
                self.problem = None
                return answer
            except LIBRARY_ERRORS as error:
                self.close()
                if deadline.expired:
                    raise self._lost(first_line(error)) from error
            time.sleep(min(pause_s, deadline.left_s()))
            pause_s = min(2 * pause_s, longest_s)

    def _connect(self, deadline: Deadline) -> _Connection:
        timeout_s = min(max(deadline.left_s(), _LAST_TRY_S), _CONNECT_S)
        host, port = self.address.host, self.address.port
        # torch's client goes on trying, and writes to stderr, where nothing listens any more; this says so at once.
        with contextlib.closing(socket.create_connection((host, port), timeout=timeout_s)):
            pass
        worker = Worker("gpusync-store")

        def connect() -> TCPStore:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))

        try:
            store = worker.call(connect, timeout_s=timeout_s + _LAST_TRY_S)
            found = worker.call(lambda: store.compare_set(ATTACH_KEY, _NOTHING, _NOTHING).decode(), timeout_s=timeout_s)
        except LIBRARY_ERRORS:
            worker.close()
            raise
        if found == _NOTHING:
            worker.close()
            raise ConnectionError("the store is not ready")
        if self.attach_id not in (None, found):
            worker.close()
            raise self._lost("another store answers there: attach anew")
        self.attach_id = found
        self._connection = _Connection(store, worker)
        return self._connection

    def _lost(self, reason: str) -> StoreLostError:
        text = f"the group's store on rank 0 at {self.address} cannot be reached: {reason}"
        self.problem = text
        return StoreLostError(text, missing=(0,))
