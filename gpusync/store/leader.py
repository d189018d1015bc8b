"""The leader's part of a prepare: decode each delta of a chain once for this host, tell its ranks what to apply."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpusync.codec import open_delta
from gpusync.errors import DigestMismatchError, Where
from gpusync.mirror.change import Delta, checked_payload, pending_changes
from gpusync.mirror.workers import for_each
from gpusync.store.compact import CompactWriter, Step, Window
from gpusync.store.rank import TensorUpdate
from gpusync.stream import OpenFiles, PublishedVersion, StoredTensor, element_bytes, is_float_order


def decode_chain(
    versions: Sequence[PublishedVersion], tensors: Mapping[str, StoredTensor], path: Path, *, workers: int
) -> dict[str, TensorUpdate]:
    """Decode the chain into a compact file at `path`: what it does to every tensor it changes, in a fixed order.

    Every check of the payloads' form is made here; whether the result is right is for the digests to say. Raises what
    decoders raise; the file is of no use then.
    """
    changes = pending_changes(tensors, versions)
    steps: dict[str, list[Step]] = {name: [] for name in changes}
    writer = CompactWriter(path)
    try:
        with OpenFiles() as files:

            def decode(_: int, name: str) -> None:
                for delta in changes[name].deltas:
                    steps[name].append(_decode(delta, changes[name].base, writer, files))

            for_each(changes, decode, workers=workers, size=lambda name: changes[name].base.nbytes)
    finally:
        writer.close()
    return {name: _update(name, changes[name].base, changes[name].deltas[-1], steps[name]) for name in sorted(changes)}


def _decode(delta: Delta, base: StoredTensor, writer: CompactWriter, files: OpenFiles) -> Step:
    with delta.version.open_payload(base.name, files) as payload:
        decoder = open_delta(
            checked_payload(payload, delta),
            encoding=str(delta.version.index.delta_encoding),
            nbytes=base.nbytes,
            element_bytes=element_bytes(base.dtype),
            float_order=is_float_order(base.dtype),
            where=delta.where,
        )
        return writer.add(decoder, nbytes=base.nbytes, element_bytes=element_bytes(base.dtype))


def _update(name: str, base: StoredTensor, newest: Delta, steps: Sequence[Step]) -> TensorUpdate:
    algorithm, checksum = newest.version.index.checksum_format, newest.payload.checksum
    if algorithm is None or checksum is None:
        raise DigestMismatchError("a delta has no checksum", where=newest.where, tensor=name)
    return TensorUpdate(
        nbytes=base.nbytes, steps=tuple(steps), algorithm=algorithm, checksum=checksum, where=newest.where
    )


def encode_updates(updates: Mapping[str, TensorUpdate]) -> list[object]:
    """As JSON, for the ranks of this host."""
    return [
        [
            name,
            update.nbytes,
            update.algorithm,
            update.checksum,
            None if update.where.path is None else os.fspath(update.where.path),
            update.where.version,
            [
                [
                    step.kind,
                    step.word_bytes,
                    [[w.offset, w.nbytes, w.count, w.positions_at, w.words_at] for w in step.windows],
                ]
                for step in update.steps
            ],
        ]
        for name, update in updates.items()
    ]


def decode_updates(told: Sequence[Sequence[object]]) -> dict[str, TensorUpdate]:
    """What `encode_updates` wrote, from this host's own leader."""
    found = {}
    for name, nbytes, algorithm, checksum, path, version, steps in json.loads(json.dumps(told)):
        found[name] = TensorUpdate(
            nbytes=nbytes,
            algorithm=algorithm,
            checksum=checksum,
            where=Where(path=path, version=version, tensor=name),
            steps=tuple(
                Step(
                    kind=kind,
                    word_bytes=width,
                    windows=tuple(
                        Window(offset=offset, nbytes=size, count=count, positions_at=at, words_at=words)
                        for offset, size, count, at, words in windows
                    ),
                )
                for kind, width, windows in steps
            ),
        )
    return found


def _window_fields(window: Window) -> list[int | None]:
    return [window.offset, window.nbytes, window.count, window.positions_at, window.words_at]
