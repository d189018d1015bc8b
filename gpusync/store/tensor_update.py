"""What a chain does to one tensor, as a host's leader tells its ranks. Without torch: a helper process makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusync.errors import Where
from gpusync.store.compact import Step, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorUpdate:
    """The same on every rank: steps, oldest first, and the newest checksum with the version that publishes it."""

    nbytes: int
    steps: Sequence[Step]
    algorithm: str
    checksum: str
    where: Where


def write_updates(path: Path, updates: Mapping[str, TensorUpdate]) -> None:
    told = [
        [
            name,
            update.nbytes,
            update.algorithm,
            update.checksum,
            None if update.where.path is None else os.fspath(update.where.path),
            update.where.version,
            [_encode_step(step) for step in update.steps],
        ]
        for name, update in updates.items()
    ]
    path.write_text(json.dumps(told, separators=(",", ":"), ensure_ascii=False))


def read_updates(path: Path) -> dict[str, TensorUpdate]:
    """What `write_updates` wrote, on this host, for this transaction."""
    return {
        name: TensorUpdate(
            nbytes=nbytes,
            algorithm=algorithm,
            checksum=checksum,
            where=Where(path=where, version=version, tensor=name),
            steps=tuple(_decode_step(step) for step in steps),
        )
        for name, nbytes, algorithm, checksum, where, version, steps in json.loads(path.read_text())
    }


def _encode_step(step: Step) -> list[object]:
    windows = [[getattr(window, name) for name in Window.__slots__] for window in step.windows]
    return [step.kind, step.word_bytes, windows, step.payload, step.path, step.replaces]


def _decode_step(told: Sequence[Any]) -> Step:
    kind, word_bytes, windows, payload, path, replaces = told
    return Step(
        kind=kind,
        word_bytes=word_bytes,
        windows=tuple(Window(**dict(zip(Window.__slots__, window, strict=True))) for window in windows),
        payload=None if payload is None else tuple(payload),
        path=path,
        replaces=replaces,
    )
