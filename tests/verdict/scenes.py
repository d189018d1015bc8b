"""What the ranks do in the tests of test_verdict*.py, and what each of them has seen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verdict.stage import Part, Proxy

from gpusync.errors import DigestMismatchError, GpusyncError, PeerFailedError
from gpusync.verdict import (
    OK,
    Decision,
    GroupFailedError,
    HostIdentity,
    Members,
    StoreLostError,
    Verdict,
    guard,
    open_group,
    take_step,
)
from gpusync.verdict import decide as decide_module
from gpusync.verdict.channel import ChannelLostError
from gpusync.verdict.ledger import Ledger
from gpusync.verdict.ranks import RankGroup

SCENES: dict[str, Callable[[Part], Any]] = {}
# Far above what anything takes; what a test is about has a shorter one.
LONG_S = 20.0


def scene(play: Callable[[Part], Any]) -> Callable[[Part], Any]:
    SCENES[play.__name__] = play
    return play


def attach(part: Part, *, rank: int | None = None, port: int | None = None, **options: Any) -> RankGroup:
    members = Members(
        rank=part.number if rank is None else rank,
        size=part.size,
        host="127.0.0.1",
        port=part.port if port is None else port,
    )
    group = open_group(members, **{"local_checkpoint_dir": part.place, "timeout_s": LONG_S, **options})
    assert isinstance(group, RankGroup)
    return group


def engine_group(part: Part) -> Any:
    """As an engine has it: torch.distributed, and a group of ranks in it."""
    store = dist.TCPStore("127.0.0.1", part.port, part.size, part.number == 0, timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=part.number, world_size=part.size)
    return dist.new_group(list(range(part.size)), backend="gloo")


def agree(group: RankGroup, verdict: Verdict, transaction: str, phase: str, timeout_s: float = LONG_S) -> Decision:
    return group.agree(verdict, transaction=transaction, phase=phase, timeout_s=timeout_s)


def tell(decision: Decision) -> dict[str, Any]:
    return {
        "ok": decision.ok,
        "messages": {str(rank): message for rank, message in decision.messages.items()},
        "tensors": [failure.tensor for failure in decision.failures],
        "types": [failure.error_type for failure in decision.failures],
    }


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    """What `call` raised, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except GpusyncError as error:
        seen: dict[str, Any] = {"error": type(error).__name__, "text": str(error), "tensor": error.tensor}
        if isinstance(error, PeerFailedError):
            seen["ranks"] = {str(rank): message for rank, message in error.ranks.items()}
        if isinstance(error, GroupFailedError):
            seen["missing"] = list(error.missing)
    except ArithmeticError as error:
        seen = {"error": type(error).__name__}
    else:
        seen = {"error": None}
    return seen | {"seconds": time.monotonic() - began}


@scene
def all_ok(part: Part) -> Any:
    group = attach(part)
    names = [group.begin(f"version {version}", timeout_s=LONG_S) for version in (1, 2)]
    seen = [tell(agree(group, OK, name, phase)) for name in names for phase in ("prepare", "commit")]
    result = {"names": names, "seen": seen, "problem": group.problem, "in_doubt": group.in_doubt}
    group.close()
    return result


@scene
def one_fails(part: Part) -> Any:
    """The last rank fails in prepare, with an error of ours and with one of somebody else's; then all succeed."""
    group = attach(part)
    at_fault = part.number == part.size - 1

    def mismatch() -> int:
        if at_fault:
            raise DigestMismatchError("digest differs", tensor="layers.3.w", version=7, expected="aa", found="bb")
        return part.number

    def bug() -> int:
        return len([]) // (0 if at_fault else 1)

    seen = []
    for number, work in enumerate([mismatch, bug]):
        name = group.begin("version 7", timeout_s=LONG_S)
        seen.append(
            caught(
                lambda n=name, w=work: take_step(group, "preparing", w, transaction=n, phase=f"p{n}", timeout_s=LONG_S)
            )
        )
        verdict = guard(work)
        seen.append(tell(agree(group, verdict, name, f"again {number}")))
    name = group.begin("version 7", timeout_s=LONG_S)
    value = take_step(group, "preparing", lambda: part.number * 10, transaction=name, phase="prepare", timeout_s=LONG_S)
    result = {"seen": seen, "value": value, "problem": group.problem}
    group.close()
    return result


@scene
def one_stalls(part: Part) -> Any:
    """Rank 1 comes to the agreement too late. Then all rebuild, and agree."""
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    if part.number == 1:
        part.await_signal("late")
    began = time.monotonic()
    decision = agree(group, OK, name, "prepare", timeout_s=1.0)
    seconds = time.monotonic() - began
    part.signal("late")
    check = caught(lambda: decision.check(OK, what="preparing"))
    problem = group.problem
    part.meet("told")
    if part.number != 1:
        # A group that is broken still gives a decision, at once.
        began = time.monotonic()
        outcast = tell(agree(group, OK, name, "commit", timeout_s=LONG_S)) | {"seconds": time.monotonic() - began}
    else:
        outcast = None
    group.rebuild(timeout_s=LONG_S)
    again = tell(agree(group, OK, "t2", "prepare"))
    result = {"decision": tell(decision), "seconds": seconds, "check": check, "problem": problem}
    result |= {"outcast": outcast, "again": again, "problem_after": group.problem}
    group.close()
    return result


@scene
def one_is_late_to_begin(part: Part) -> Any:
    """Rank 1 misses a whole transaction, and then comes to the next one as if nothing had been."""
    group = attach(part)
    first = None
    if part.number != 1:
        first = caught(lambda: group.begin("version 1", timeout_s=0.5))
    part.meet("missed")
    name = group.begin("version 2", timeout_s=LONG_S)
    again = tell(agree(group, OK, name, "prepare"))
    group.close()
    return {"first": first, "name": name, "again": again}


@scene
def killed_before_posting(part: Part) -> Any:
    return killed(part, victim=part.size - 1, has_posted=False)


@scene
def killed_after_posting(part: Part) -> Any:
    return killed(part, victim=part.size - 1, has_posted=True)


def before_reduce(act: Callable[[], object]) -> None:
    """Do something in the next agreement, once, after the verdict is posted and before it is reduced."""
    reduce = decide_module._Voter._reduce

    def act_and_reduce(voter: Any, vote: Verdict) -> list[int]:
        decide_module._Voter._reduce = reduce  # type: ignore[method-assign]
        act()
        return reduce(voter, vote)

    decide_module._Voter._reduce = act_and_reduce  # type: ignore[method-assign]


def killed(part: Part, *, victim: int, has_posted: bool) -> Any:
    """The victim dies at its verdict; an understudy takes its place, and the group is rebuilt."""
    if part.number >= part.size:
        part.await_signal("told.0")
        group = attach(part, rank=victim)
    else:
        group = attach(part)
        name = group.begin("version 1", timeout_s=LONG_S)
        tell(agree(group, OK, name, "prepare"))
        if part.number == victim:
            if not has_posted:
                part.die()
            before_reduce(part.die)
        began = time.monotonic()
        decision = agree(group, OK, name, "commit")
        seen = {"decision": tell(decision), "seconds": time.monotonic() - began}
        seen["alone"] = caught(lambda: group.rebuild(timeout_s=0.3))
        part.meet("told", [number for number in range(part.size) if number != victim])
        group.rebuild(timeout_s=LONG_S)
    name = group.begin("version 1", timeout_s=LONG_S)
    again = tell(agree(group, OK, name, "prepare"))
    group.close()
    return {"again": again, "name": name} | (seen if part.number < part.size else {})


@scene
def killed_rank_0(part: Part) -> Any:
    """The store dies with rank 0. The others are in doubt; attach anew with an understudy."""
    decide_module.STORE_GRACE_S = 1.0
    seen: dict[str, Any] = {}
    if part.number >= part.size:
        part.await_signal("told.1")
    else:
        group = attach(part)
        name = group.begin("version 1", timeout_s=LONG_S)
        if part.number == 0:
            for number in range(1, part.size):
                part.await_signal(f"posted.{number}")
            part.die()
        before_reduce(lambda: part.signal(f"posted.{part.number}"))
        seen["agree"] = caught(lambda: agree(group, OK, name, "prepare"))
        seen |= {"in_doubt": group.in_doubt, "problem": group.problem}
        seen["resolve"] = caught(lambda: group.resolve(name, "prepare", timeout_s=0.3))
        seen["next"] = caught(lambda: group.begin("version 1", timeout_s=0.3))
        group.close()
        part.meet("told", list(range(1, part.size)))
    group = attach(part, rank=part.number % part.size)
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["again"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def cut_before_the_record(part: Part) -> Any:
    """Rank 1 posts, takes part, and loses the store before it can learn the decision, which the others record."""
    decide_module.STORE_GRACE_S = 0.5
    proxy = Proxy(part.port) if part.number == 1 else None
    group = attach(part, port=None if proxy is None else proxy.port)
    name = group.begin("version 1", timeout_s=LONG_S)
    if proxy is not None:
        cut_at_record(proxy)
    seen: dict[str, Any] = {"agree": caught(lambda: tell(agree(group, OK, name, "commit")))}
    seen |= {"in_doubt": group.in_doubt, "problem": group.problem is not None}
    if proxy is not None:
        seen["refused"] = caught(lambda: agree(group, OK, name, "other"))
        seen["wrong"] = caught(lambda: group.resolve("another", "commit", timeout_s=0.2))
        seen["too_early"] = caught(lambda: group.resolve(name, "commit", timeout_s=0.2))
        proxy.heal()
        seen["resolved"] = tell(group.resolve(name, "commit", timeout_s=5))
        seen["problem_after"] = group.problem
    next_name = group.begin("version 2", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, next_name, "prepare"))
    group.close()
    return seen


def cut_at_record(proxy: Proxy) -> None:
    record = Ledger.record

    def cut_and_record(ledger: Ledger, *arguments: Any, **options: Any) -> Decision:
        Ledger.record = record  # type: ignore[method-assign]
        proxy.cut()
        return record(ledger, *arguments, **options)

    Ledger.record = cut_and_record  # type: ignore[method-assign]


@scene
def nobody_recorded(part: Part) -> Any:
    """All lose the store at once, after a complete all-reduce. The first to be back decides, and nobody has acted."""
    decide_module.STORE_GRACE_S = 0.3
    proxy = Proxy(part.port)
    group = attach(part, port=proxy.port if part.number else None)
    name = group.begin("version 1", timeout_s=LONG_S)
    record = Ledger.record

    def lost(*_: Any, **__: Any) -> Decision:
        raise StoreLostError("cut")

    Ledger.record = lost  # type: ignore[method-assign,assignment]
    seen: dict[str, Any] = {"agree": caught(lambda: agree(group, OK, name, "prepare"))}
    Ledger.record = record  # type: ignore[method-assign]
    part.meet("doubt")
    seen["resolved"] = tell(group.resolve(name, "prepare", timeout_s=5))
    name = group.begin("version 2", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def vetoed(part: Part) -> Any:
    """All complete the all-reduce, but rank 1 takes it for lost, and is the first to record."""
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    record, reduce = Ledger.record, decide_module._Voter._reduce

    def lose(voter: Any, vote: Verdict) -> list[int]:
        reduce(voter, vote)
        raise ChannelLostError("lost at the last moment")

    def record_late(ledger: Ledger, *arguments: Any, **options: Any) -> Decision:
        part.await_signal("recorded")
        return record(ledger, *arguments, **options)

    if part.number == 1:
        decide_module._Voter._reduce = lose  # type: ignore[method-assign]
    else:
        Ledger.record = record_late  # type: ignore[method-assign]
    decision = agree(group, OK, name, "prepare")
    part.signal("recorded")
    Ledger.record, decide_module._Voter._reduce = record, reduce  # type: ignore[method-assign]
    name = group.begin("version 1", timeout_s=LONG_S)
    seen = {"decision": tell(decision), "next": tell(agree(group, OK, name, "prepare"))}
    group.close()
    return seen


@scene
def interrupted(part: Part) -> Any:
    """Rank 1 is interrupted between its vote and the decision."""
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    seen: dict[str, Any] = {"interrupted": False}

    def interrupt() -> None:
        raise KeyboardInterrupt

    if part.number == 1:
        before_reduce(interrupt)
    try:
        seen["decision"] = tell(agree(group, OK, name, "commit", timeout_s=0.3))
    except KeyboardInterrupt:
        seen |= {"interrupted": True, "in_doubt": group.in_doubt}
        part.meet("decided")
        seen["decision"] = tell(group.resolve(name, "commit", timeout_s=5))
    else:
        part.meet("decided")
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def cut_before_posting(part: Part) -> Any:
    """Rank 1 has no store when it comes to vote. Nothing can have been decided, so nobody is in doubt."""
    decide_module.STORE_GRACE_S = 0.5
    proxy = Proxy(part.port) if part.number == 1 else None
    group = attach(part, port=None if proxy is None else proxy.port)
    name = group.begin("version 1", timeout_s=LONG_S)
    agree(group, OK, name, "prepare")
    if proxy is not None:
        proxy.cut()
    decision = agree(group, OK, name, "commit")
    seen: dict[str, Any] = {"decision": tell(decision), "in_doubt": group.in_doubt}
    seen["check"] = caught(lambda: decision.check(OK, what="committing"))
    part.meet("decided")
    if proxy is not None:
        proxy.heal()
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    # A connection that is merely broken is made again without anybody noticing.
    if proxy is not None:
        proxy.cut()
        proxy.heal()
    seen["reconnected"] = tell(agree(group, OK, name, "commit"))
    group.close()
    return seen


@scene
def store_is_stopped(part: Part) -> Any:
    """Rank 0 is stopped, and the store with it: neither answers, neither is gone."""
    decide_module.STORE_GRACE_S = 0.5
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    seen: dict[str, Any] = {}
    part.meet("begun")
    if part.number == 0:
        part_1_posts = partial(part.await_signal, "posted")
        before_reduce(lambda: (part_1_posts(), os.kill(os.getpid(), signal.SIGSTOP)))
    else:
        before_reduce(lambda: part.signal("posted"))
    seen["agree"] = caught(lambda: agree(group, OK, name, "prepare", timeout_s=1.0))
    seen["in_doubt"] = group.in_doubt
    if part.number == 1:
        os.kill(int((part.place / "pid.0").read_text()), signal.SIGCONT)
        seen["resolved"] = tell(group.resolve(name, "prepare", timeout_s=10))
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def different_subjects(part: Part) -> Any:
    """Rank 1 is asked for another version than the others."""
    group = attach(part)
    seen: dict[str, Any] = {"first": caught(lambda: group.begin(f"version {part.number == 1}", timeout_s=LONG_S))}
    part.meet("told")
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def fails_during_an_exchange(part: Part) -> Any:
    """Rank 1 fails while the others exchange data, and goes to its verdict without them."""
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)

    def prepare() -> None:
        group.sum_int64(np.ones(8, dtype=np.int64), timeout_s=LONG_S)
        if part.number == 1:
            raise MemoryError("no room for the scratch")
        group.sum_int64(np.ones(8, dtype=np.int64), timeout_s=LONG_S)

    began = time.monotonic()
    verdict = guard(prepare)
    decision = agree(group, verdict, name, "prepare")
    seen: dict[str, Any] = {"decision": tell(decision), "seconds": time.monotonic() - began}
    seen["mine"] = verdict.error_type
    try:
        decision.check(verdict, what="preparing")
    except (MemoryError, PeerFailedError) as error:
        seen["raised"] = type(error).__name__
    seen["problem"] = group.problem is not None
    # No data until the group is whole; verdicts still work.
    seen["sum"] = caught(lambda: group.sum_int64(np.ones(8, dtype=np.int64), timeout_s=LONG_S))
    seen["verdicts"] = tell(agree(group, OK, name, "abort"))
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["after"] = group.sum_int64(np.ones(3, dtype=np.int64), timeout_s=LONG_S).tolist()
    seen["next"] = tell(agree(group, OK, name, "prepare"))
    group.close()
    return seen


@scene
def stalls_in_an_exchange(part: Part) -> Any:
    """The last rank does not come to a sum in time."""
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    if part.number == part.size - 1:
        part.await_signal("late")
    verdict = guard(lambda: group.sum_int64(np.ones(8, dtype=np.int64), timeout_s=0.7))
    part.signal("late")
    decision = agree(group, verdict, name, "prepare")
    seen: dict[str, Any] = {"message": verdict.message, "type": verdict.error_type, "decision": tell(decision)}
    name = group.begin("version 1", timeout_s=LONG_S)
    seen["after"] = group.sum_int64(np.ones(3, dtype=np.int64), timeout_s=LONG_S).tolist()
    group.close()
    return seen


@scene
def dies_in_an_exchange(part: Part) -> Any:
    group = attach(part)
    name = group.begin("version 1", timeout_s=LONG_S)
    if part.number == part.size - 1:
        part.die()
    verdict = guard(lambda: group.gather_bytes(b"x", timeout_s=LONG_S))
    began = time.monotonic()
    decision = agree(group, verdict, name, "prepare")
    seen = {"message": verdict.message, "decision": tell(decision), "seconds": time.monotonic() - began}
    part.meet("told", list(range(part.size - 1)))
    return seen


@scene
def exchanges(part: Part) -> Any:
    group = attach(part)
    rank, size = part.number, part.size
    extremes = np.array([2**63 - 1, -(2**63), -1, 2**62, 0], dtype=np.int64)
    mine = np.roll(extremes, rank)
    keep = mine.copy()
    total = group.sum_int64(mine, timeout_s=LONG_S)
    large = np.random.default_rng(rank).integers(-(2**63), 2**63 - 1, size=100_003, dtype=np.int64)
    large_total = group.sum_int64(large, timeout_s=LONG_S)
    expected = sum(
        np.random.default_rng(of).integers(-(2**63), 2**63 - 1, size=100_003, dtype=np.int64).astype(np.uint64)
        for of in range(size)
    )
    before = group.traffic
    messages = [
        group.broadcast_bytes(bytes(range(rank, rank + 5)), source=source, timeout_s=LONG_S) for source in range(size)
    ]
    messages.append(group.broadcast_bytes(b"" if rank == 0 else None, source=0, timeout_s=LONG_S))
    after = group.traffic
    gathered = group.gather_bytes(bytes([rank]) * (rank * 1000), timeout_s=LONG_S)
    result = {
        "sum": total.tolist(),
        "untouched": mine.tolist() == keep.tolist(),
        "large": large_total.view(np.uint64).tolist() == np.asarray(expected).tolist(),
        "empty": group.sum_int64(np.zeros(0, dtype=np.int64), timeout_s=LONG_S).tolist(),
        "matrix": group.sum_int64(np.full((2, 3), rank, dtype=np.int64), timeout_s=LONG_S).tolist(),
        "broadcast": [list(message) for message in messages],
        "broadcast_bytes": after.nbytes - before.nbytes,
        "broadcast_calls": after.calls - before.calls,
        "gather": [[len(data), sorted(set(data))] for data in gathered],
        "objects": group.gather_objects({"rank": rank, "big": 2**70, "text": "ä"}, timeout_s=LONG_S),
        "float": caught(lambda: group.sum_int64(np.zeros(1), timeout_s=LONG_S)),  # type: ignore[arg-type]
        "problem": group.problem,
    }
    group.close()
    return result


@scene
def beside_the_engine(part: Part) -> Any:
    """The engine's own group is at work in another thread, in an order of its own."""
    engine = engine_group(part)
    group = open_group(engine, local_checkpoint_dir=part.place, timeout_s=LONG_S)
    stop = threading.Event()
    sums: list[bool] = []

    def serve() -> None:
        for step in range(10_000):
            tensor = torch.tensor([part.number + step, int(stop.is_set())])
            dist.all_reduce(tensor, group=engine)
            sums.append(int(tensor[0]) == sum(range(part.size)) + step * part.size)
            if int(tensor[1]) == part.size:
                return
            time.sleep(0.001 * part.number)

    thread = threading.Thread(target=serve)
    thread.start()
    ok = []
    for version in range(40):
        name = group.begin(f"version {version}", timeout_s=LONG_S)
        total = group.sum_int64(np.array([part.number + version]), timeout_s=LONG_S)
        ok.append(total.tolist() == [sum(range(part.size)) + part.size * version])
        ok.append(group.agree(OK, transaction=name, phase="prepare", timeout_s=LONG_S).ok)
    stop.set()
    thread.join()
    # Attach anew while the first one is still there: the address found first is the old one's.
    if part.number == 0:
        time.sleep(0.3)
    second = open_group(engine, local_checkpoint_dir=part.place, timeout_s=LONG_S)
    ok.append(second.agree(OK, transaction="t", phase="p", timeout_s=LONG_S).ok)
    ok.append(group.agree(OK, transaction="t", phase="p", timeout_s=LONG_S).ok)
    addresses = [str(one.store_address) for one in (group, second) if isinstance(one, RankGroup)]
    group.close()
    second.close()
    return {"ok": all(ok), "count": len(ok), "sums": all(sums), "steps": len(sums), "addresses": addresses}


@scene
def many_transactions(part: Part) -> Any:
    group = attach(part)
    counts = []
    for version in range(1000):
        name = str(version)
        verdict = Verdict.failed("now and then") if version % 100 == 99 and part.number == 1 else OK
        assert agree(group, verdict, name, "prepare").ok == verdict.ok or part.number != 1
        assert agree(group, OK, name, "commit").ok
        if version in (10, 500, 998):
            part.meet(f"at {version}")
            counts.append([group.count_keys(timeout_s=5), len(os.listdir("/proc/self/fd")), threading.active_count()])
            part.meet(f"counted {version}")
    group.close()
    return counts


@scene
def two_hosts(part: Part) -> Any:
    """Ranks 0 and 2 on one host, 1 and 3 on another; rank 3 of the second machine has the same directory's name."""
    boot = "even" if part.number % 2 == 0 else "odd"
    group = attach(part, host=HostIdentity(boot_id=boot, local_dir="/ckpt", name=f"{boot}-host"))
    name = group.begin("version 1", timeout_s=LONG_S)
    verdict = Verdict.failed("version is missing") if part.number == 1 else OK
    decision = agree(group, verdict, name, "prepare")
    result = {
        "leader": group.leader,
        "is_leader": group.is_leader,
        "local": list(group.local_ranks),
        "leaders": list(group.leaders),
        "decision": tell(decision),
    }
    group.close()
    return result


def refused(part: Part, **options: Any) -> Any:
    return caught(lambda: attach(part, **{"timeout_s": 5.0, **options}))


@scene
def versions_differ(part: Part) -> Any:
    return refused(part, version="0.2" if part.number == 1 else "0.1")


@scene
def capabilities_differ(part: Part) -> Any:
    capabilities: dict[str, Any] = {"codec": 2, "digest": "xxh3"}
    if part.number == part.size - 1:
        capabilities = {"codec": 3}
    return refused(part, capabilities=capabilities, details={"rank": part.number})


@scene
def details_differ(part: Part) -> Any:
    group = attach(part, capabilities={"codec": 2}, details={"device": part.number})
    told = [dict(hello.details) for hello in group.roster.members]
    group.close()
    return told


@scene
def one_has_a_problem(part: Part) -> Any:
    return refused(part, problem="no layout for this model" if part.number == 0 else None)


@scene
def one_never_comes(part: Part) -> Any:
    if part.number == part.size - 1:
        return None
    return refused(part, timeout_s=1.0)


@scene
def rank_0_never_comes(part: Part) -> Any:
    engine = engine_group(part)
    seen = None
    if part.number != 0:
        seen = caught(lambda: open_group(engine, local_checkpoint_dir=part.place, timeout_s=0.7))
    part.meet("told")
    # It was only late: the next attempt is everybody's.
    group = open_group(engine, local_checkpoint_dir=part.place, timeout_s=LONG_S)
    ok = group.agree(OK, transaction="t", phase="p", timeout_s=LONG_S).ok
    group.close()
    return {"seen": seen, "ok": ok}
