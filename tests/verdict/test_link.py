"""The connection to the group's store: exactly one record, an end to every wait, and reconnection."""

from __future__ import annotations

import socket
import threading
import time
import uuid

import pytest
from verdict.stage import Proxy, free_port

from gpusync.verdict import GroupFailedError, StoreLostError
from gpusync.verdict.bounded import Deadline
from gpusync.verdict.link import ATTACH_KEY, Address, StoreLink, serve_store


@pytest.fixture
def served():
    store, address = serve_store("127.0.0.1")
    store.set(ATTACH_KEY, uuid.uuid4().hex)
    yield address
    del store


@pytest.fixture
def link(served):
    link = StoreLink(served)
    yield link
    link.close()


def soon() -> Deadline:
    return Deadline(5)


def test_reading_what_is_not_there_does_not_wait(link):
    began = time.monotonic()
    assert link.read("a", deadline=soon()) is None
    # And does not make it be there.
    assert link.read("a", deadline=soon()) is None
    assert link.count_keys(deadline=soon()) <= 2
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("value", ["1", "ä\n" * 1000, "?x", "[]"])
def test_what_is_recorded_is_read(link, value):
    assert link.record("a", value, deadline=soon()) == value
    assert link.read("a", deadline=soon()) == value
    link.replace("a", "other", deadline=soon())
    assert link.read("a", deadline=soon()) == "other"
    link.delete("a", deadline=soon())
    assert link.read("a", deadline=soon()) is None


def test_exactly_one_of_many_writers_succeeds(served):
    start = threading.Barrier(8)
    held: list[str] = []

    def write(number: int) -> None:
        link = StoreLink(served)
        link.read("warm", deadline=soon())
        start.wait(10)
        held.append(link.record("decision", str(number), deadline=soon()))
        link.close()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(10)
    assert len(held) == 8
    assert len(set(held)) == 1


def test_the_store_listens_at_its_address_only(served):
    with socket.socket() as other:
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", served.port)) != 0


def test_a_store_that_is_not_there_is_named_in_time():
    address = Address(host="127.0.0.1", port=free_port())
    link = StoreLink(address)
    began = time.monotonic()
    with pytest.raises(StoreLostError, match=f"store on rank 0 at {address} cannot be reached") as caught:
        link.read("a", deadline=Deadline(0.2))
    assert time.monotonic() - began < 2
    assert caught.value.missing == (0,)
    assert link.problem == str(caught.value)


def test_an_address_that_cannot_be_served_is_an_error(served):
    with pytest.raises(GroupFailedError, match=r"cannot serve a store at 203\.0\.113\.1"):
        serve_store("203.0.113.1")
    with pytest.raises(GroupFailedError, match=f":{served.port}"):
        serve_store("127.0.0.1", served.port)


def test_a_connection_that_was_cut_is_made_again(served):
    proxy = Proxy(served.port)
    link = StoreLink(Address(host="127.0.0.1", port=proxy.port))
    link.record("a", "1", deadline=soon())
    proxy.cut()
    with pytest.raises(StoreLostError):
        link.read("a", deadline=Deadline(0.2))
    assert link.problem is not None
    proxy.heal()
    assert link.read("a", deadline=soon()) == "1"
    assert link.problem is None
    proxy.cut()
    link.close()


def test_another_store_at_the_same_address_is_not_taken_for_the_first():
    port = free_port()
    store, address = serve_store("127.0.0.1", port)
    link = StoreLink(address)
    # Not before rank 0 has made it ready.
    with pytest.raises(StoreLostError, match="not ready"):
        link.read("a", deadline=Deadline(0.1))
    store.set(ATTACH_KEY, "one")
    assert link.record("a", "1", deadline=soon()) == "1"
    link.close()
    del store
    store, _ = serve_store("127.0.0.1", port)
    store.set(ATTACH_KEY, "two")
    began = time.monotonic()
    with pytest.raises(StoreLostError, match="another store answers there: attach anew"):
        link.read("a", deadline=soon())
    assert time.monotonic() - began < 3
    del store
