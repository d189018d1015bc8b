"""Whole streams to pull from: a base, a history of versions, and what every one of them must look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpusync import Publisher
from gpusync.mirror.verify import verify_directory
from gpusync.publish import StoredBytes
from support.checkpoints import State, changed, read_state, tensor, write_checkpoint
from support.kill import Pull
from support.slime import publish_delta, publish_full

LEFTOVERS = ("journal.json", "redo", "incoming")


@dataclass(frozen=True)
class Stream:
    """`states[n]` is version n; version 0 is the base."""

    base: Path
    source: Path
    states: Sequence[State]

    def pull(self, local: Path, target: int, **options: object) -> Pull:
        return Pull(local=local, base=self.base, source=self.source, target=target, options=options)


def few_tensors(seed: int = 0) -> State:
    """Small, in two shards; one tensor is of two windows, so that it is scattered by two writes."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": tensor(rng, "F8_E4M3", 1100, 1000),
        "layer.0.weight": tensor(rng, "BF16", 64, 48),
        "layer.1.weight": tensor(rng, "F16", 33, 7),
        "layer.1.codes": tensor(rng, "F8_E4M3", 101, 101),
        "step": tensor(rng, "I64", 3),
        "empty": tensor(rng, "F32", 0, 4),
    }


def tiny_tensors() -> State:
    """A few pages, tensors that begin and end within one, some that share one."""
    rng = np.random.default_rng(7)
    return {
        "a.weight": tensor(rng, "BF16", 90, 100),
        "a.codes": tensor(rng, "F8_E4M3", 31, 17),
        "b.weight": tensor(rng, "F32", 40, 50),
        "b.scale": tensor(rng, "F32"),
    }


def write_stream(root: Path, kind: str, state: State, *, count: int, share: float = 0.01) -> Stream:
    """Versions 1 to `count`. `kind`: "xor", "overwrite", "gpusync", or "full" (xor, and a full version before last)."""
    base, source = write_checkpoint(root / "base", state), root / "stream"
    source.mkdir()
    states = [state]
    publisher = Publisher(source, base_dir=base, encoding="gpusync") if kind == "gpusync" else None
    for version in range(1, count + 1):
        states.append(changed(states[-1], 1000 + version, share=share))
        if publisher is not None:
            publisher.publish(
                {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in states[-1].items()}
            )
        elif kind == "full" and version == count - 1:
            publish_full(source, version, states[-1], files={"config.json": f'{{"version": {version}}}'})
        else:
            publish_delta(source, version, states[-2], states[-1], encoding="xor" if kind == "full" else kind)
    return Stream(base=base, source=source, states=states)


def said_version(local: Path) -> int | None:
    """What the local directory says it holds."""
    state = local / ".weight_sync" / "state.json"
    return int(json.loads(state.read_text())["version"]) if state.exists() else None


def check_local(local: Path, stream: Stream, version: int, note: object) -> None:
    """The directory holds `version`, says so, can prove it, and nothing unfinished is left in it."""
    assert said_version(local) == version, note
    assert read_state(local) == stream.states[version], note
    assert verify_directory(local).damage is None, note
    left = [name for name in LEFTOVERS if (local / ".weight_sync" / name).exists()]
    assert not left, f"{note}: {left}"
