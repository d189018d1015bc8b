"""What ranks tell each other, and when they may work together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpusync.verdict import GroupFailedError, HandshakeError, HostIdentity
from gpusync.verdict.handshake import (
    Hello,
    Roster,
    encode_hello,
    encode_roster,
    find_disagreement,
    parse_hello,
    parse_roster,
)
from gpusync.verdict.hosts import ProcessIdentity

HELLO = Hello(
    nonce="n0",
    version="0.1",
    host=HostIdentity(boot_id="b", local_dir="/ckpt", name="h"),
    process=ProcessIdentity(pid=1, namespace="pid:[1]", start="7"),
    capabilities={"codec": 2, "device": "cuda", "fast": True, "none": None},
    details={"free": 1.5},
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"nonce": "n1", "details": {"free": 9}, "process": ProcessIdentity(pid=2, namespace="", start="")}, None),
        ({"host": HostIdentity(boot_id="x", local_dir="/y", name="h")}, None),
        ({"version": "0.2"}, "rank 1 (host h): gpusync 0.2, rank 0 has 0.1"),
        (
            {"capabilities": {"codec": 3, "device": "cuda", "fast": True, "none": None}},
            "rank 1 (host h): codec is 3, on rank 0 2",
        ),
        (
            {"capabilities": {"codec": 2, "device": "cuda", "fast": 1, "extra": "x"}},
            'rank 1 (host h): extra is "x", on rank 0 missing, fast is 1, on rank 0 true, '
            "none is missing, on rank 0 null",
        ),
        ({"problem": "no device", "version": "0.2"}, "rank 1 (host h): no device"),
    ],
)
def test_ranks_agree_when_version_and_capabilities_do(change, reason):
    assert find_disagreement([HELLO, replace(HELLO, **change), HELLO]) == reason


def test_all_that_disagree_are_named():
    reason = find_disagreement([HELLO, replace(HELLO, version="2"), replace(HELLO, version="3")])
    assert reason == "rank 1 (host h): gpusync 2, rank 0 has 0.1; rank 2 (host h): gpusync 3, rank 0 has 0.1"


def test_a_hello_travels():
    assert parse_hello(encode_hello(HELLO)) == HELLO
    assert parse_hello(encode_hello(replace(HELLO, problem="p"))).problem == "p"


def test_a_roster_travels():
    roster = Roster(generation=3, hellos=(HELLO, None), problem="rank 1 did not come", missing=(1,))
    assert parse_roster(encode_roster(roster)) == roster
    assert roster.nonces == {"n0"}
    assert Roster(generation=1, hellos=(HELLO, HELLO)).hosts.leaders == (0,)


@pytest.mark.parametrize("text", ['{"protocol": 9, "nonce": "n9", "version": "9.9"}', "[]", "{}"])
def test_a_hello_of_another_protocol_is_a_problem(text):
    hello = parse_hello(text)
    told = json.loads(text) or {}
    assert hello.problem == f"gpusync {told.get('version')} speaks protocol {told.get('protocol')}, not 1"
    assert hello.nonce == str(told.get("nonce"))


def test_a_roster_of_another_protocol_is_a_problem_to_its_members():
    text = json.dumps({"protocol": 9, "hellos": [{"nonce": "n9", "whatever": 1}, None]})
    roster = parse_roster(text)
    assert roster.nonces == {"n9"}
    with pytest.raises(HandshakeError, match="rank 0 speaks protocol 9, not 1"):
        roster.check()


def test_a_roster_with_a_problem_is_an_error():
    Roster(generation=1, hellos=(HELLO,)).check()
    with pytest.raises(HandshakeError, match="the ranks may not work together: rank 1: no"):
        Roster(generation=1, hellos=(HELLO,), problem="rank 1: no").check()
    with pytest.raises(GroupFailedError, match="did not come") as caught:
        Roster(generation=1, hellos=(HELLO, None, None), problem="ranks 1, 2 did not come", missing=(1, 2)).check()
    assert caught.value.missing == (1, 2)
    assert type(caught.value) is GroupFailedError
