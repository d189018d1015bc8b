"""Ranks decide together: one decision for all, whoever fails, stalls, dies or loses the store (verdict/scenes.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from verdict.stage import KILLED, Company

Play = Callable[..., list[Any]]
# Of the ranks' own: what they wait for in vain, the roll call, and a machine that is busy.
SOON_S = 1.5
FINE = {"ok": True, "messages": {}, "tensors": [], "types": []}


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    company = Company()
    yield company
    company.close()


@pytest.fixture
def play(company: Company, tmp_path: Path) -> Play:
    def play(scene: str, size: int, *, understudies: int = 0) -> list[Any]:
        return company.play(scene, size=size, parts=size + understudies, place=tmp_path)

    return play


@pytest.mark.parametrize("size", [2, 4])
def test_all_ok(play, size):
    ranks = play("all_ok", size)
    assert all(seen == ranks[0] for seen in ranks)
    assert ranks[0] == {"names": ["1.0", "1.1"], "seen": [FINE] * 4, "problem": None, "in_doubt": None}


@pytest.mark.parametrize("size", [2, 4])
def test_one_fails_and_all_know_who_where_and_what(play, size):
    ranks = play("one_fails", size)
    at_fault = str(size - 1)
    text = "digest differs: tensor `layers.3.w`, version 7; expected aa, found bb"
    for rank, seen in enumerate(ranks):
        raised, told, raised_by_bug, told_of_bug = seen["seen"]
        assert told["ok"] is False
        assert list(told["messages"]) == [at_fault]
        assert told["messages"][at_fault].startswith("on ")
        assert told["messages"][at_fault].endswith(f": {text}")
        assert (told["tensors"], told["types"]) == (["layers.3.w"], ["DigestMismatchError"])
        assert told_of_bug["types"] == ["ZeroDivisionError"]
        if rank == size - 1:
            # Its own error, as it was.
            assert (raised["error"], raised["text"]) == ("DigestMismatchError", text)
            assert raised_by_bug["error"] == "ZeroDivisionError"
        else:
            assert (raised["error"], raised["ranks"]) == ("PeerFailedError", told["messages"])
            assert (raised_by_bug["error"], raised_by_bug["ranks"]) == ("PeerFailedError", told_of_bug["messages"])
        # A verdict that failed leaves the group whole.
        assert (seen["problem"], seen["value"]) == (None, rank * 10)


def test_a_rank_that_stalls_is_named_and_the_group_is_rebuilt(play):
    ranks = play("one_stalls", 3)
    for rank, seen in enumerate(ranks):
        assert list(seen["decision"]["messages"]) == ["1"]
        message = seen["decision"]["messages"]["1"]
        assert "posted no verdict on phase `prepare` of transaction `1.0`" in message
        assert "within 1 s" in message
        assert seen["check"]["error"] == ("GroupFailedError" if rank == 1 else "PeerFailedError")
        # The time-out, and the roll call: no more.
        assert seen["seconds"] < (SOON_S if rank == 1 else 3 + SOON_S)
        assert seen["problem"] is not None
        assert (seen["again"], seen["problem_after"]) == (FINE, None)
        if rank != 1:
            assert seen["outcast"]["ok"] is False
            assert seen["outcast"]["seconds"] < SOON_S


def test_a_rank_that_missed_a_transaction_comes_to_the_next(play):
    first, late = play("one_is_late_to_begin", 2)
    assert first["first"]["error"] == "PeerFailedError"
    assert list(first["first"]["ranks"]) == ["1"]
    assert first["name"] == late["name"]
    assert first["again"] == late["again"] == FINE


@pytest.mark.parametrize(("scene", "size"), [("killed_before_posting", 2), ("killed_after_posting", 4)])
def test_a_rank_that_is_killed_is_named_and_replaced(play, scene, size):
    *survivors, victim, understudy = play(scene, size, understudies=1)
    assert victim == KILLED
    before = "posted no verdict" if scene == "killed_before_posting" else "went silent after its verdict"
    for seen in survivors:
        assert list(seen["decision"]["messages"]) == [str(size - 1)]
        message = seen["decision"]["messages"][str(size - 1)]
        assert before in message
        assert message.endswith("its process has ended")
        # Nobody waited for the time-out.
        assert seen["seconds"] < 2 + SOON_S
        # The group is not whole before the understudy comes.
        assert (seen["alone"]["error"], seen["alone"]["missing"]) == ("GroupFailedError", [size - 1])
        assert seen["again"] == FINE
        assert seen["name"] == understudy["name"]
    assert understudy["again"] == FINE


def test_when_rank_0_is_killed_the_others_are_in_doubt_until_they_attach_anew(play):
    victim, *survivors, understudy = play("killed_rank_0", 3, understudies=1)
    assert victim == KILLED
    for seen in survivors:
        assert seen["agree"]["error"] == "InDoubtError"
        assert seen["in_doubt"] == ["1.0", "prepare"]
        assert "the group's store on rank 0 at 127.0.0.1:" in seen["problem"]
        assert "cannot be reached" in seen["problem"]
        assert (seen["resolve"]["error"], seen["next"]["error"]) == ("InDoubtError", "InDoubtError")
        assert seen["again"] == FINE
    assert understudy["again"] == FINE


def test_a_rank_that_misses_the_decision_is_in_doubt_and_resolves_it_by_the_record(play):
    sound, cut = play("cut_before_the_record", 2)
    assert (sound["agree"]["error"], sound["in_doubt"], sound["problem"]) == (None, None, False)
    assert (cut["agree"]["error"], cut["in_doubt"], cut["problem"]) == ("InDoubtError", ["1.0", "commit"], True)
    assert (cut["refused"]["error"], cut["too_early"]["error"]) == ("InDoubtError", "InDoubtError")
    assert cut["wrong"]["error"] == "GpusyncError"
    # As the others decided it, who have acted on it.
    assert cut["resolved"] == FINE
    assert cut["problem_after"] is None
    assert sound["next"] == cut["next"] == FINE


def test_what_nobody_recorded_has_failed(play):
    ranks = play("nobody_recorded", 2)
    assert [seen["agree"]["error"] for seen in ranks] == ["InDoubtError"] * 2
    assert ranks[0]["resolved"]["ok"] is False
    assert ranks[0]["resolved"] == ranks[1]["resolved"]
    assert [seen["next"] for seen in ranks] == [FINE] * 2


def test_the_first_record_holds_even_for_those_who_saw_no_failure(play):
    ranks = play("vetoed", 3)
    assert [seen["decision"]["ok"] for seen in ranks] == [False] * 3
    assert all(seen["decision"] == ranks[0]["decision"] for seen in ranks)
    assert [seen["next"] for seen in ranks] == [FINE] * 3


def test_a_rank_that_is_interrupted_after_its_vote_is_in_doubt(play):
    waiting, interrupted = play("interrupted", 2)
    assert (interrupted["interrupted"], interrupted["in_doubt"]) == (True, ["1.0", "commit"])
    assert waiting["decision"]["ok"] is False
    assert waiting["decision"] == interrupted["decision"]
    assert waiting["next"] == interrupted["next"] == FINE


def test_a_rank_without_the_store_fails_the_decision_and_nobody_is_in_doubt(play):
    ranks = play("cut_before_posting", 3)
    for rank, seen in enumerate(ranks):
        assert seen["decision"]["ok"] is False
        assert list(seen["decision"]["messages"]) == ["1"]
        assert "the group's store" in seen["decision"]["messages"]["1"]
        assert seen["in_doubt"] is None
        assert seen["check"]["error"] == ("GroupFailedError" if rank == 1 else "PeerFailedError")
        assert (seen["next"], seen["reconnected"]) == (FINE, FINE)


def test_a_store_that_is_stopped_does_not_hang_anybody(play):
    stopped, waiting = play("store_is_stopped", 2)
    assert (waiting["agree"]["error"], waiting["in_doubt"]) == ("InDoubtError", ["1.0", "prepare"])
    assert waiting["agree"]["seconds"] < 8
    assert waiting["resolved"]["ok"] is False
    assert stopped["in_doubt"] is None
    assert stopped["next"] == waiting["next"] == FINE


def test_ranks_that_are_asked_for_different_things_refuse(play):
    ranks = play("different_subjects", 3)
    for rank, seen in enumerate(ranks):
        assert seen["first"]["error"] == ("GroupFailedError" if rank == 1 else "PeerFailedError")
        assert "decides on phase `begin version True`" in seen["first"]["text"]
        assert "not on phase `begin version False`" in seen["first"]["text"]
        assert seen["next"] == FINE


def test_nobody_waits_in_an_exchange_for_a_rank_that_has_failed(play):
    ranks = play("fails_during_an_exchange", 4)
    for rank, seen in enumerate(ranks):
        # Only the cause is told; that the others gave up is its consequence.
        assert list(seen["decision"]["messages"]) == ["1"]
        assert seen["decision"]["messages"]["1"].endswith("MemoryError: no room for the scratch")
        assert seen["seconds"] < SOON_S
        assert seen["mine"] == seen["raised"] == ("MemoryError" if rank == 1 else "PeerFailedError")
        assert seen["problem"] is True
        assert seen["sum"]["error"] == "GroupFailedError"
        assert seen["verdicts"] == FINE
        assert seen["after"] == [4, 4, 4]
        assert seen["next"] == FINE


def test_a_rank_that_does_not_come_to_an_exchange_is_named(play):
    ranks = play("stalls_in_an_exchange", 3)
    # Whoever is the first to give up tells the others why.
    assert "GroupFailedError" in {seen["type"] for seen in ranks[:2]}
    for seen in ranks:
        assert seen["type"] in {"GroupFailedError", "PeerFailedError"}
        assert "a sum of 8 int64 waited 0.7 s for rank 2 on " in seen["message"]
        assert seen["decision"]["ok"] is False
        assert seen["after"] == [3, 3, 3]


def test_a_rank_that_dies_in_an_exchange_is_named(play):
    *survivors, victim = play("dies_in_an_exchange", 3)
    assert victim == KILLED
    for seen in survivors:
        assert "lost its connection to rank 2" in seen["message"]
        assert "its process has ended" in seen["message"]
        assert "2" in seen["decision"]["messages"]
        assert seen["seconds"] < SOON_S


@pytest.mark.parametrize("size", [2, 4])
def test_exchanges(play, size):
    extremes = [2**63 - 1, -(2**63), -1, 2**62, 0]
    columns = zip(*[extremes[-rank:] + extremes[:-rank] if rank else extremes for rank in range(size)], strict=True)
    wrapped = [(sum(column) + 2**63) % 2**64 - 2**63 for column in columns]
    for seen in play("exchanges", size):
        assert seen["sum"] == wrapped
        assert seen["untouched"] is True
        assert seen["large"] is True
        assert seen["empty"] == []
        assert seen["matrix"] == [[sum(range(size))] * 3] * 2
        assert seen["broadcast"] == [list(range(rank, rank + 5)) for rank in range(size)] + [[]]
        assert (seen["broadcast_bytes"], seen["broadcast_calls"]) == (5 * size, size + 1)
        assert seen["gather"] == [[rank * 1000, [rank] if rank else []] for rank in range(size)]
        assert seen["objects"] == [{"rank": rank, "big": 2**70, "text": "ä"} for rank in range(size)]
        assert seen["float"]["error"] == "GpusyncError"
        assert seen["problem"] is None


@pytest.mark.parametrize("size", [2, 4])
def test_the_engine_goes_on_with_its_own_collectives(play, size):
    for seen in play("beside_the_engine", size):
        assert (seen["ok"], seen["count"]) == (True, 82)
        assert seen["sums"] is True
        assert seen["steps"] >= 20
        # Two attaches, two stores.
        assert len(set(seen["addresses"])) == 2


def test_many_transactions_leave_nothing_behind(play):
    for seen in play("many_transactions", 2):
        early, middle, late = seen
        assert early == middle == late


def test_two_hosts_of_two_ranks(play):
    ranks = play("two_hosts", 4)
    assert [seen["leader"] for seen in ranks] == [0, 1, 0, 1]
    assert [seen["is_leader"] for seen in ranks] == [True, True, False, False]
    assert [seen["local"] for seen in ranks] == [[0, 2], [1, 3]] * 2
    assert [seen["leaders"] for seen in ranks] == [[0, 1]] * 4
    for seen in ranks:
        assert seen["decision"]["messages"] == {"1": "on odd-host: version is missing"}


@pytest.mark.parametrize(
    ("scene", "size", "reasons"),
    [
        ("versions_differ", 2, ["rank 1 (host ", "gpusync 0.2, rank 0 has 0.1"]),
        ("capabilities_differ", 3, ["rank 2 (host ", "codec is 3, on rank 0 2", "digest is missing"]),
        ("one_has_a_problem", 2, ["rank 0 (host ", "no layout for this model"]),
    ],
)
def test_ranks_that_may_not_work_together_all_learn_why(play, scene, size, reasons):
    ranks = play(scene, size)
    assert {seen["error"] for seen in ranks} == {"HandshakeError"}
    assert len({seen["text"] for seen in ranks}) == 1
    for reason in reasons:
        assert reason in ranks[0]["text"]
    # Nobody waited for a time-out.
    assert max(seen["seconds"] for seen in ranks) < 4


def test_details_may_differ(play):
    assert play("details_differ", 2) == [[{"device": 0}, {"device": 1}]] * 2


def test_a_rank_that_never_comes_is_named_to_those_that_came(play):
    *came, absent = play("one_never_comes", 3)
    assert absent is None
    for seen in came:
        assert (seen["error"], seen["missing"]) == ("GroupFailedError", [2])
        assert seen["text"] == "rank 2 did not come within 1 s"
        assert seen["seconds"] < 1 + SOON_S


def test_rank_0_that_is_late_is_named_and_the_next_attach_succeeds(play):
    late, waiting = play("rank_0_never_comes", 2)
    assert (waiting["seen"]["error"], waiting["seen"]["missing"]) == ("GroupFailedError", [0])
    assert waiting["seen"]["seconds"] < 0.7 + SOON_S
    assert late["ok"] is waiting["ok"] is True
