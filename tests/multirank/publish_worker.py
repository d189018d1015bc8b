"""One rank of a publishing trainer, run as a process: plays every scene in turn and writes down what it saw.

All scenes run in one process group, because importing torch is what takes time. The last one ends it: a rank dies.
Arguments: rank, size, directory.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpusync.errors import GpusyncError, PeerFailedError
from gpusync.publish import Publisher, StoredBytes
from gpusync.stream import INDEX_NAME
from support.checkpoints import State, changed, small_state
from support.shortcuts import older_states

Scene = Callable[["Rank"], dict[str, Any]]
SCENES: dict[str, Scene] = {}


def scene(play: Scene) -> Scene:
    SCENES[play.__name__] = play
    return play


class Rank:
    def __init__(self, rank: int, size: int, place: Path) -> None:
        self.rank, self.size, self.place = rank, size, place
        self.base = place / "base"
        self.state = small_state()
        self.source = place

    def publisher(self, **settings: Any) -> Publisher:
        return Publisher(self.source, base_dir=self.base, group=dist.group.WORLD, **{"workers": 2, **settings})

    def share(self, state: State) -> dict[str, StoredBytes]:
        """Every size-th tensor: disjoint among the ranks."""
        return offer({name: state[name] for name in list(state)[self.rank :: self.size]})

    def attempt(self, call: Callable[[], Any]) -> dict[str, Any]:
        """What came of it, and what the directory of version 1 showed when it had."""
        try:
            report = call()
        except Exception as error:  # noqa: BLE001
            seen: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
            if isinstance(error, PeerFailedError):
                seen["ranks"] = error.ranks
            if isinstance(error, GpusyncError):
                seen["tensor"] = error.tensor
        else:
            seen = {"version": report.version, "changed": report.tensors_changed, "offered": report.tensors_offered}
            seen |= {"wire_bytes": report.wire_bytes, "shards": report.shards, "ranks": report.ranks}
        # The others may still be taking their files away.
        dist.barrier()
        return seen


def offer(state: State) -> dict[str, StoredBytes]:
    return {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in state.items()}


@scene
def together(rank: Rank) -> dict[str, Any]:
    """Disjoint tensors, delta, full and delta again, from dicts and from iterators."""
    publisher = rank.publisher(encoding="xor")
    states = [changed(rank.state, 1)]
    states += [changed(states[-1], 2)]
    states += [changed(states[-1], 3)]
    first = rank.attempt(lambda: publisher.publish(rank.share(states[0])))
    second = rank.attempt(lambda: publisher.publish_full(iter(rank.share(states[1]).items())))
    third = rank.attempt(lambda: publisher.publish(rank.share(states[2])))
    return {"steps": [first, second, third], "stream_id": publisher.stream_id, "version": publisher.version}


@scene
def rank_0_offers_nothing(rank: Rank) -> dict[str, Any]:
    publisher = rank.publisher()
    mine = {} if rank.rank == 0 else {n: t for n, t in changed(rank.state, 1).items() if n.startswith("layer")}
    return {"steps": [rank.attempt(lambda: publisher.publish(offer(mine)))]}


@scene
def same_tensors_everywhere(rank: Rank) -> dict[str, Any]:
    """Every rank offers everything: as a dict, as an iterator, and in small shards that are written by then."""
    publisher = rank.publisher(shard_bytes=1000)
    states = [changed(rank.state, seed) for seed in (1, 2, 3)]
    steps = [
        rank.attempt(lambda: publisher.publish(offer(states[0]))),
        rank.attempt(lambda: publisher.publish(iter(offer(states[1]).items()))),
        rank.attempt(lambda: publisher.publish_full(iter(offer(states[2]).items()))),
    ]
    return {"steps": steps}


@scene
def different_bytes(rank: Rank) -> dict[str, Any]:
    """The last rank has one tensor otherwise; the retry, with equal bytes, succeeds."""
    publisher = rank.publisher(checksum="adler32")
    after = changed(rank.state, 1)
    mine = changed(after, 2, names=["layer.1.weight"]) if rank.rank == rank.size - 1 else after
    refused = rank.attempt(lambda: publisher.publish(offer(mine)))
    left = os.listdir(rank.source) if rank.source.exists() else []
    dist.barrier()
    return {"steps": [refused, rank.attempt(lambda: publisher.publish(offer(after)))], "left": left}


def failing_hook(rank: Rank, *, failing_rank: int, failing_call: int) -> dict[str, Any]:
    calls: list[bool] = []

    def hook(version_dir: str) -> None:
        calls.append(INDEX_NAME in os.listdir(version_dir))
        if rank.rank == failing_rank and len(calls) == failing_call:
            raise OSError(5, "volume commit failed")

    publisher = rank.publisher(post_write_hook=hook)
    after = changed(rank.state, 1)
    failed = rank.attempt(lambda: publisher.publish(rank.share(after)))
    left = os.listdir(rank.source) if rank.source.exists() else []
    version = publisher.version
    dist.barrier()
    retried = rank.attempt(lambda: publisher.publish(rank.share(after)))
    return {"steps": [failed, retried], "left": left, "version": version, "hook_saw_index": calls}


@scene
def hook_fails_on_one_rank(rank: Rank) -> dict[str, Any]:
    return failing_hook(rank, failing_rank=rank.size - 1, failing_call=1)


@scene
def hook_fails_after_the_index(rank: Rank) -> dict[str, Any]:
    return failing_hook(rank, failing_rank=0, failing_call=2)


@scene
def gathering_iterator(rank: Rank) -> dict[str, Any]:
    """Each step of the iterator is a collective. One rank fails at its first tensor: nobody may hang."""
    publisher = rank.publisher(workers=1, encoding="overwrite")
    after = changed(rank.state, 1)
    broken = rank.rank == 1

    def tensors(*, wrong: bool) -> Iterator[tuple[str, Any]]:
        for number, (name, tensor) in enumerate(offer(after).items()):
            seen = torch.tensor([number])
            dist.all_reduce(seen)
            if number % rank.size == rank.rank:
                yield name, "not a tensor" if wrong else tensor

    failed = rank.attempt(lambda: publisher.publish(tensors(wrong=broken)))
    return {"steps": [failed, rank.attempt(lambda: publisher.publish(tensors(wrong=False)))]}


@scene
def a_tensor_moves_to_another_rank(rank: Rank) -> dict[str, Any]:
    """Who holds a tensor's old state is not who publishes it next: that rank reads it back from the stream."""
    publisher = rank.publisher(encoding="gpusync")
    states = [changed(rank.state, seed) for seed in (1, 2, 3)]
    steps = []
    for turn, state in enumerate(states):
        names = list(state)[(rank.rank + turn) % rank.size :: rank.size]
        mine = offer({name: state[name] for name in names})
        steps.append(rank.attempt(lambda mine=mine: publisher.publish(mine)))
    return {"steps": steps}


@scene
def ranks_that_want_different_things(rank: Rank) -> dict[str, Any]:
    publisher = rank.publisher()
    version = 7 if rank.rank == 0 else 8
    refused = rank.attempt(lambda: publisher.publish({}, version=version))
    published = rank.attempt(lambda: publisher.publish({}, version=7))
    again = rank.attempt(lambda: publisher.publish({}, version=7))
    return {"steps": [refused, published, again]}


@scene
def resumed(rank: Rank) -> dict[str, Any]:
    states = [changed(rank.state, 1)]
    states += [changed(states[-1], 2)]
    first = rank.publisher()
    steps = [rank.attempt(lambda: first.publish(rank.share(states[0])))]
    second = rank.publisher(resume=True)
    steps += [rank.attempt(lambda: second.publish(rank.share(states[1])))]
    return {"steps": steps, "same_stream": first.stream_id == second.stream_id}


@scene
def on_an_older_version(rank: Rank) -> dict[str, Any]:
    """Deltas on versions that are not the newest: shares and a failure on one rank, then everything from everybody;
    the stream goes on, from iterators; then one tensor of all.
    """
    failing = False

    def hook(_: str) -> None:
        if failing and rank.rank == rank.size - 1:
            raise OSError(5, "volume commit failed")

    publisher = rank.publisher(post_write_hook=hook)
    states = older_states(rank.state)
    steps = [rank.attempt(lambda state=state: publisher.publish(rank.share(state))) for state in states[1:3]]
    refused = [rank.attempt(lambda: publisher.publish({}, base_version=min(rank.rank, 1)))]
    failing = True
    refused += [rank.attempt(lambda: publisher.publish(rank.share(states[3]), base_version=1))]
    left, version = (rank.source / "weight_v000003").exists(), publisher.version
    failing = False
    last = {"step": states[6]["step"]} if rank.rank == rank.size - 1 else {}
    steps += [
        rank.attempt(lambda: publisher.publish(rank.share(states[3]), base_version=1)),
        rank.attempt(lambda: publisher.publish(offer(states[4]), base_version=1)),
        rank.attempt(lambda: publisher.publish(iter(offer(states[5]).items()))),
        rank.attempt(lambda: publisher.publish(offer(last), base_version=2)),
    ]
    return {"steps": steps, "refused": refused, "left": left, "version": version}


@scene
def a_setting_that_is_wrong_on_one_rank(rank: Rank) -> dict[str, Any]:
    encoding = "zzz" if rank.rank == 1 else "xor"
    return {"steps": [rank.attempt(lambda: rank.publisher(encoding=encoding))]}


def a_rank_dies(rank: Rank) -> dict[str, Any]:
    """Not among the scenes: there is no group after it."""
    publisher = rank.publisher(shard_bytes=1)

    def tensors() -> Iterator[tuple[str, Any]]:
        yield from rank.share(changed(rank.state, 1)).items()
        if rank.rank == rank.size - 1:
            os._exit(0)

    try:
        publisher.publish(tensors())
    except GpusyncError as error:
        mine = f"-{rank.rank:05d}-of-"
        left = [path.name for path in rank.source.rglob("*") if mine in path.name]
        return {"error": type(error).__name__, "text": str(error), "left": left, "version": publisher.version}
    return {"error": None}


def main() -> None:
    rank, size, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    me = Rank(rank, size, place)
    for name, play in SCENES.items():
        me.source = place / name
        dist.barrier()
        start = time.perf_counter()
        seen = play(me)
        seen["seconds"] = time.perf_counter() - start
        (place / f"{name}.{rank}.json").write_text(json.dumps(seen))
    me.source = place / "a_rank_dies"
    (place / f"a_rank_dies.{rank}.json").write_text(json.dumps(a_rank_dies(me)))
    # No orderly end of a group that has lost a member.
    os._exit(0)


if __name__ == "__main__":
    main()
