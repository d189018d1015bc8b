"""Verdicts and what becomes of them."""

from __future__ import annotations

import pytest

from gpusync.errors import DigestMismatchError, GpusyncError, PeerFailedError
from gpusync.verdict import OK, Decision, Failure, GroupFailedError, Verdict, guard
from gpusync.verdict.verdict import (
    MAX_MESSAGE_CHARACTERS,
    PostedVerdict,
    encode_failures,
    encode_verdict,
    find_failures,
    parse_failures,
    parse_verdict,
)


def raising(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("error", "message", "tensor", "is_consequence"),
    [
        (DigestMismatchError("differs", tensor="a.w"), "differs: tensor `a.w`", "a.w", False),
        (MemoryError("no room"), "MemoryError: no room", None, False),
        (RuntimeError("CUDA error: launch failed"), "RuntimeError: CUDA error: launch failed", None, False),
        (PeerFailedError("given up", ranks={2: "bad"}), "given up (rank 2: bad)", None, True),
    ],
)
def test_guard_makes_a_verdict_of_any_error(error, message, tensor, is_consequence):
    verdict = guard(lambda: raising(error))
    assert not verdict.ok
    assert (verdict.message, verdict.tensor, verdict.is_consequence) == (message, tensor, is_consequence)
    assert verdict.error_type == type(error).__name__
    assert verdict.error is error


def test_guard_of_work_that_succeeds_is_ok():
    done = []
    assert guard(lambda: done.append(1)) == OK
    assert (done, OK.ok) == ([1], True)


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
def test_guard_lets_through_what_ends_the_process(leaving):
    with pytest.raises(leaving):
        guard(lambda: raising(leaving()))


def test_a_message_is_bounded():
    assert len(str(Verdict.of(ValueError("x" * 10**6)).message)) == MAX_MESSAGE_CHARACTERS


@pytest.mark.parametrize("verdict", [OK, Verdict.failed("bad", tensor="w", error_type="E"), Verdict.of(ValueError())])
def test_a_verdict_travels_without_its_error(verdict):
    posted = parse_verdict(encode_verdict(verdict, transaction="t", phase="p"))
    assert posted == PostedVerdict(transaction="t", phase="p", verdict=verdict)
    assert posted.verdict.error is None


def test_failures_travel():
    failures = (
        Failure(rank=3, host="h", message="ä\n", tensor="w", error_type="E"),
        Failure(rank=0, host="", message=""),
    )
    assert parse_failures(encode_failures(failures)) == failures
    assert parse_failures(encode_failures([])) == ()


def test_consequences_are_told_only_if_there_is_nothing_else():
    root = PostedVerdict(transaction="t", phase="p", verdict=Verdict.failed("cause", tensor="w", error_type="E"))
    gave_up = Verdict.of(PeerFailedError("given up", ranks={1: "cause"}))
    consequence = PostedVerdict(transaction="t", phase="p", verdict=gave_up)
    fine = PostedVerdict(transaction="t", phase="p", verdict=OK)
    hosts = {rank: f"host{rank}" for rank in range(3)}
    told = find_failures({0: consequence, 1: root, 2: fine}, hosts=hosts)
    assert told == (Failure(rank=1, host="host1", message="cause", tensor="w", error_type="E"),)
    told = find_failures({0: consequence, 2: fine}, hosts=hosts)
    assert [failure.rank for failure in told] == [0]
    assert find_failures({0: fine}, hosts=hosts) == ()


def decision(*failed: int, rank: int = 0) -> Decision:
    failures = tuple(Failure(rank=one, host=f"h{one}", message=f"m{one}") for one in failed)
    return Decision(transaction="t", phase="p", rank=rank, failures=failures)


def test_a_decision_without_failures_is_ok():
    assert decision().ok
    decision().check(OK, what="preparing")


ERROR = DigestMismatchError("differs")
GAVE_UP = Verdict.of(PeerFailedError("given up", ranks={1: "bad"}))


@pytest.mark.parametrize(
    ("failed", "mine", "error", "text"),
    [
        ((0,), Verdict.of(ERROR), DigestMismatchError, "differs"),
        ((0, 1), Verdict.of(ERROR), DigestMismatchError, "differs"),
        ((0,), Verdict.failed("by hand"), GpusyncError, "by hand"),
        ((1, 2), OK, PeerFailedError, "preparing failed on another rank (rank 1: on h1: m1; rank 2: on h2: m2)"),
        ((1,), GAVE_UP, PeerFailedError, "preparing failed on another rank (rank 1: on h1: m1)"),
        ((0,), OK, GroupFailedError, "preparing failed because of this rank, on h0: m0"),
    ],
)
def test_every_rank_raises_what_it_should(failed, mine, error, text):
    with pytest.raises(error) as caught:
        decision(*failed).check(mine, what="preparing")
    assert type(caught.value) is error
    assert str(caught.value) == text
    if mine.error is ERROR:
        assert caught.value is ERROR
    if isinstance(caught.value, PeerFailedError):
        assert caught.value.ranks == {rank: f"on h{rank}: m{rank}" for rank in failed}
