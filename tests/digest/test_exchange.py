"""Rounds between ranks: who gets what, what is counted, and how one rank's failure reaches the others."""

import numpy as np
import pytest

from gpusync.digest import ShardedTensor, Shards, blocks
from gpusync.digest.exchange import Attempts, GroupFailedError, Round, Seat, Traffic, run_together, to_all
from gpusync.digest.program import digest_program
from gpusync.errors import GpusyncError, LayoutError, PeerFailedError


def payload(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def test_every_rank_gets_what_the_others_have_for_it_and_what_it_sent_is_counted():
    def program(rank):
        outgoing = [payload(f"{rank}>{r}".encode()) for r in range(3)]
        received = yield Round(outgoing=outgoing, incoming=[3, 3, 3], sent={"words": 6})
        everyone = yield to_all("results", payload(bytes(rank)), 3)
        return [bytes(each) for each in received], [each.size for each in everyone]

    traffic = [Traffic() for _ in range(3)]
    results = run_together([program(rank) for rank in range(3)], traffic)
    assert results == [([f"{r}>{rank}".encode() for r in range(3)], [0, 1, 2]) for rank in range(3)]
    # lengths that the others do not know are sent ahead, 8 bytes each
    assert [(each.words, each.results, each.rounds) for each in traffic] == [(6, 2 * (8 + r), 2) for r in range(3)]
    traffic[0].add(traffic[2])
    assert (traffic[0].nbytes, traffic[0].rounds) == (6 + 16 + 6 + 20, 4)


def test_ranks_that_are_out_of_step_are_noticed():
    def program(rank):
        yield to_all("results", payload(b"12"), 2, incoming=[2, 1 + rank])

    with pytest.raises(RuntimeError, match="out of step"):
        run_together([program(0), program(1)])


def test_of_several_errors_the_cause_is_raised():
    def program(rank):
        yield to_all("results", payload(b""), 3)
        raise LayoutError("mine") if rank == 2 else PeerFailedError("theirs", ranks={2: "mine"})

    with pytest.raises(LayoutError, match="mine"):
        run_together([program(rank) for rank in range(3)])


def test_attempts_stop_at_the_first_failure_and_keep_it():
    attempts = Attempts()
    assert attempts.run(lambda: 1, lambda: 2) == 1
    assert attempts.message is None
    assert attempts.run(lambda: 1 // 0, lambda: 2) == 2
    assert attempts.run(lambda: 1, lambda: 2) == 2
    assert attempts.message == "ZeroDivisionError: integer division or modulo by zero"
    attempts.problem = LayoutError("a byte is on no rank")
    assert attempts.message == "a byte is on no rank"


def test_a_failed_group_names_the_cause():
    error = GroupFailedError(RuntimeError("Connection closed by peer"))
    assert isinstance(error, PeerFailedError)
    assert error.ranks == {}
    assert str(error) == "the process group failed, a rank may be gone: Connection closed by peer"


@pytest.mark.parametrize("step", ["_sum", "absorb", "advance"])
def test_a_rank_that_fails_in_the_middle_stays_in_step_and_tells_the_others(monkeypatch, step):
    real = getattr(blocks._Work, step)

    def fail_on_rank_1(work, *arguments):
        if work.plan.rank == 1:
            raise RuntimeError("out of memory")
        return real(work, *arguments)

    monkeypatch.setattr(blocks._Work, step, fail_on_rank_1)
    data = np.arange(9000, dtype=np.uint16).view(np.uint8)
    cuts = [0, 5000, 11_111, data.size]

    def guarded(rank):
        tensor = ShardedTensor(
            name="w",
            algorithm="xxh3-128",
            nbytes=data.size,
            pieces=[(cuts[rank], data[cuts[rank] : cuts[rank + 1]])],
        )
        try:
            yield from digest_program(Shards.of([tensor]).itself, Seat(rank=rank, ranks=3, budget_bytes=2000))
        except (GpusyncError, RuntimeError) as error:
            return error
        return None

    errors = run_together([guarded(rank) for rank in range(3)])
    assert str(errors[1]) == "out of memory"
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerFailedError)
        assert error.ranks == {1: "RuntimeError: out of memory"}
