"""What ranks do in the tests of test_ranks.py: each serves its slices of a model and follows a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verdict.scenes import caught, cut_at_record
from verdict.stage import Part, Proxy

from gpusync.errors import GpusyncError
from gpusync.store.operations import BlobSteps, MovedBytes, OverwriteWords, PlaneSteps, XorWords
from gpusync.verdict import Members
from gpusync.verdict import decide as decide_module
from support.engines import EngineRank
from support.models import ModelConfig
from support.models_layers import Ranks

SCENES: dict[str, Callable[[Part], Any]] = {}
VERSIONS = 12
OPERATIONS = (XorWords, OverwriteWords, BlobSteps, PlaneSteps, MovedBytes)


def scene(play: Callable[[Part], Any]) -> Callable[[Part], Any]:
    SCENES[play.__name__] = play
    return play


def engine(part: Part, *, rank: int | None = None, port: int | None = None, **options: Any) -> EngineRank:
    """`part.place` holds the base and the stream; `tied` there says what model it is."""
    number = part.number if rank is None else rank
    members = Members(rank=number, size=part.size, host="127.0.0.1", port=part.port if port is None else port)
    return EngineRank(
        Path(part.place),
        ModelConfig(tied=(part.place / "tied").exists()),
        ranks=Ranks(number, part.size),
        group=members,
        versions=VERSIONS,
        **{"in_process": True, "timeout": 20.0, **options},
    )


@scene
def follow(part: Part) -> Any:
    """Every version in turn, by chains of one, two and three; in windows on some ranks, at once on others."""
    staging = 30_000 if part.number % 2 else 1 << 30
    one = engine(part, staging_bytes=staging, in_process=False)
    addresses, reports = one.addresses(), []
    for version in (1, 3, 4, 7, 8, 10, 12):
        report = one.sync.pull(version)
        one.assert_live(version)
        reports.append([report.commit_path, list(report.chain)])
    seen = {"reports": reports, "moved": one.addresses() != addresses, "reloads": one.reloads}
    one.sync.close()
    return seen


def failing(action: str) -> Callable[[EngineRank], Callable[[], None]]:
    """Breaks one rank; returns what mends it."""

    def out_of_memory(one: EngineRank) -> Callable[[], None]:
        real = one.sync._rank.live.store.memory.empty

        def empty(nbytes: int) -> Any:
            raise MemoryError("the device has no memory left")

        one.sync._rank.live.store.memory.empty = empty
        return lambda: setattr(one.sync._rank.live.store.memory, "empty", real)

    def launch(one: EngineRank) -> Callable[[], None]:
        """The first operation of a commit writes half of its bytes, as it were, and fails."""
        real = {kind: kind.apply for kind in OPERATIONS}

        def broken(kind: Any) -> Any:
            def apply(operation: Any) -> None:
                real[kind](operation)
                raise RuntimeError("an illegal memory access was encountered")

            return apply

        for kind in OPERATIONS:
            kind.apply = broken(kind)  # type: ignore[method-assign]
        return lambda: [setattr(kind, "apply", real[kind]) for kind in OPERATIONS] and None

    def recompute(one: EngineRank) -> Callable[[], None]:
        real = one.sync._rank.live.recompute
        calls = []

        def broken(names: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("a derived tensor cannot be computed")
            real(names)

        one.sync._rank.live.recompute = broken  # type: ignore[method-assign]
        return lambda: setattr(one.sync._rank.live, "recompute", real)

    def flipped(one: EngineRank) -> Callable[[], None]:
        """A bit of what the commit has written flips before it is looked at."""
        real = one.sync._rank.live.store.verify
        one.sync._rank.live.store.verify = lambda update: real(update) or "proj.weight"  # type: ignore[method-assign]
        return lambda: setattr(one.sync._rank.live.store, "verify", real)

    return {"out_of_memory": out_of_memory, "launch": launch, "recompute": recompute, "flipped": flipped}[action]


@scene
def faults(part: Part) -> Any:
    """One after the other on the last rank; after each the old version is live on all, and the next pull works."""
    one = engine(part)
    one.sync.pull(1)
    seen: dict[str, Any] = {}
    for version, action, phase in (
        (2, "out_of_memory", "prepare"),
        (3, "launch", "commit"),
        (4, "recompute", "commit"),
        (7, "flipped", "commit"),
    ):
        one.sync.pull(version - 1)
        prepared = one.sync.prepare(version) if phase == "commit" else None
        mend = failing(action)(one) if part.number == part.size - 1 else lambda: None
        call = (lambda: one.sync.prepare(version)) if prepared is None else (lambda: one.sync.commit(prepared))  # noqa: B023
        seen[action] = told(call)
        mend()
        one.assert_live(version - 1)
        one.sync.pull(version)
        one.assert_live(version)
    seen["reloads"] = one.reloads
    one.sync.close()
    return seen


def told(call: Callable[[], Any]) -> dict[str, Any]:
    """What was raised, by whatever name."""
    try:
        call()
    except GpusyncError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except (MemoryError, RuntimeError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


@scene
def bad_streams(part: Part) -> Any:
    """Version 2 is wrong in the way its directory says; every rank raises, and version 3 works."""
    one = engine(part)
    one.sync.pull(1)
    seen = {"raised": told(lambda: one.sync.pull(2)), "version": one.sync.version}
    one.assert_live(1)
    one.sync.pull(5)  # a full version: the way past
    one.assert_live(5)
    one.sync.close()
    return seen


@scene
def stalls(part: Part) -> Any:
    """The last rank does not come to its verdict in time; the others name it, and all go on together afterwards."""
    one = engine(part, timeout=3.0)
    one.sync.pull(1)
    last, store = part.number == part.size - 1, one.sync._rank.live.store
    real = store.reserve
    if last:
        store.reserve = lambda updates: (part.await_signal("others.0", 30), real(updates))[1]  # type: ignore[method-assign]
    began = time.monotonic()
    seen = {"raised": told(lambda: one.sync.pull(2)), "seconds": time.monotonic() - began}
    store.reserve = real  # type: ignore[method-assign]
    one.assert_live(1)
    if not last:
        part.signal(f"others.{part.number}")
    part.meet("again")
    one.sync.pull(2)
    one.assert_live(2)
    one.sync.close()
    return seen


@scene
def killed_in_prepare(part: Part) -> Any:
    return _killed(part, phase="prepare")


@scene
def killed_in_commit(part: Part) -> Any:
    return _killed(part, phase="commit")


def _killed(part: Part, *, phase: str) -> Any:
    """The last rank dies; the others hold the old version. An understudy with the base attaches, and all go on."""
    victim = part.size - 1
    if part.number >= part.size:
        part.await_signal("told.0", 60)
        one = engine(part, rank=victim)
        seen: dict[str, Any] = {"attached": one.sync.version}
    else:
        one = engine(part, timeout=8.0)
        one.sync.pull(1)
        prepared = None if phase == "prepare" else one.sync.prepare(2)
        if part.number == victim:
            name = "reserve" if phase == "prepare" else "verify"
            setattr(one.sync._rank.live.store, name, lambda *_: part.die())
        seen = {"raised": told(lambda: one.sync.prepare(2) if prepared is None else one.sync.commit(prepared))}
        one.assert_live(1)
        seen["alone"] = told(lambda: one.sync.pull(2))
        one.assert_live(1)
        part.meet("told", [number for number in range(part.size) if number != victim])
        one.sync._rank.team.timeout_s = 30.0
    report = one.sync.pull(2)
    one.assert_live(2)
    seen |= {"path": report.commit_path, "version": one.sync.version}
    one.sync.close()
    return seen


@scene
def in_doubt(part: Part) -> Any:
    """Rank 1 commits and cannot learn the decision: it is not ready until its next call."""
    decide_module.STORE_GRACE_S = 0.5
    proxy = Proxy(part.port) if part.number == 1 else None
    one = engine(part, port=None if proxy is None else proxy.port)
    prepared = one.sync.prepare(1)
    if proxy is not None:
        real = one.sync._rank.live.store.verify

        def cut(update: Any) -> Any:
            cut_at_record(proxy)
            return real(update)

        one.sync._rank.live.store.verify = cut  # type: ignore[method-assign]
    seen: dict[str, Any] = {"commit": caught(lambda: one.sync.commit(prepared))["error"]}
    seen |= {"ready": one.sync.ready, "doubt": one.sync.in_doubt is not None}
    if proxy is not None:
        one.sync._rank.live.store.verify = real  # type: ignore[method-assign]
        proxy.heal()
    part.meet("committed")
    one.sync.pull(2)
    one.assert_live(2)
    seen["ready_after"] = one.sync.ready
    one.sync.close()
    return seen


@scene
def two_hosts(part: Part) -> Any:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    one = engine(part, host=f"host{part.number // 2}")
    seen: dict[str, Any] = {"leaders": list(one.sync._rank.team.group.leaders)}
    fetches = []
    if one.sync._rank.host is not None:
        real = one.sync._rank.host.mirror.receive
        one.sync._rank.host.mirror.receive = lambda *a, **k: (fetches.append(a), real(*a, **k))[1]  # type: ignore[method-assign]
    for version in (1, 3):
        one.sync.pull(version)
        one.assert_live(version)
    seen["fetches"] = len(fetches)
    if part.number == 2:
        one.sync._rank.host._sources = _blind(one.sync._rank.host._sources)
        one.sync._rank.host.mirror._sources = one.sync._rank.host._sources
    seen["raised"] = told(lambda: one.sync.pull(4))
    one.assert_live(3)
    one.sync.close()
    return seen


def _blind(sources: Any) -> Any:
    """A host on which nothing is published."""
    return type(sources)(source_dir=sources.source_dir.parent / "elsewhere", base_dir=sources.base_dir)
