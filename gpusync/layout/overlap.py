"""What the writes to one storage mean together: who is overwritten, who is written twice, and by whom.

The later write wins, as it did in the loader. A tensor whose bytes something else has overwritten is opaque. Two
tensors that go to the very same places are replicas, as a tied `lm_head` is; two that share only some are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gpusync.errors import LayoutError
from gpusync.layout.placement import Piece
from gpusync.layout.record import Record, Write
from gpusync.layout.segments import destination_runs


def find_overwritten(record: Record) -> None:
    """Refuses every tensor of which a later write, of no tensor or of an opaque one, has taken bytes. Changes `record`.

    A tensor that becomes opaque so makes its own writes such writes.
    """
    known = -1
    while known != len(record.opaque):
        known = len(record.opaque)
        for writes in record.writes.values():
            for name, by in _overwritten(writes, record.opaque):
                record.refuse([name], f"{by} overwrites it after it was loaded")


def find_replicas(pieces: Mapping[str, tuple[Piece, ...]], order: Mapping[str, int]) -> dict[str, str]:
    """Of tensors with equal pieces: each but the last written -> the last written. `order` ranks them."""
    alike: dict[tuple[Piece, ...], list[str]] = {}
    for name, its_pieces in pieces.items():
        if its_pieces:
            alike.setdefault(its_pieces, []).append(name)
    replicas = {}
    for names in alike.values():
        *earlier, last = sorted(names, key=lambda name: order[name])
        replicas.update(dict.fromkeys(earlier, last))
    return replicas


def find_self_overlaps(pieces: Mapping[str, tuple[Piece, ...]]) -> list[str]:
    """Tensors that go twice to the same bytes."""
    return [
        name
        for name, its_pieces in pieces.items()
        if any(_first_overlap([(name, piece) for piece in group]) for group in _by_storage(its_pieces).values())
    ]


def check_apart(pieces: Mapping[str, tuple[Piece, ...]]) -> None:
    """Raises LayoutError where two tensors go to the same bytes, naming both."""
    by_storage: dict[str, list[tuple[str, Piece]]] = {}
    for name, its_pieces in pieces.items():
        for piece in its_pieces:
            by_storage.setdefault(piece.param, []).append((name, piece))
    for storage, entries in by_storage.items():
        overlap = _first_overlap(entries)
        if overlap is not None:
            first, second, byte = overlap
            raise LayoutError(
                f"two tensors are loaded into the same bytes of `{storage}`",
                tensor=second,
                expected=f"byte {byte} to be written once",
                found=f"tensor `{first}` there",
            )


def _overwritten(writes: Sequence[Write], opaque: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for place, write in enumerate(writes):
        if write.tensor is not None and write.tensor not in opaque:
            continue
        by = write.operation if write.tensor is None else f"tensor `{write.tensor}`"
        for earlier in writes[:place]:
            name = earlier.tensor
            if name is None or name in opaque or not _spans_meet(earlier.piece, write.piece):
                continue
            if _first_overlap([(name, earlier.piece), ("", write.piece)]) is not None:
                yield name, by


def _first_overlap(entries: Sequence[tuple[str, Piece]]) -> tuple[str, str, int] | None:
    """Two entries that hold the same byte, and that byte of the storage."""
    runs = [destination_runs([piece]) for _, piece in entries]
    owner = np.repeat(np.arange(len(runs)), [len(each) for each in runs])
    every = np.concatenate([*runs, np.empty((0, 2), np.int64)])
    order = np.argsort(every[:, 0], kind="stable")
    every, owner = every[order], owner[order]
    reach = np.maximum.accumulate(every[:, 1]) if len(every) else every[:, 1]
    overlaps = np.flatnonzero(every[1:, 0] < reach[:-1])
    if not len(overlaps):
        return None
    second = int(overlaps[0]) + 1
    first = int(np.flatnonzero(every[:second, 1] > every[second, 0])[0])
    return entries[owner[first]][0], entries[owner[second]][0], int(every[second, 0])


def _spans_meet(one: Piece, other: Piece) -> bool:
    (a, b), (c, d) = one.dst_span, other.dst_span
    return a < d and c < b


def _by_storage(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    by_storage: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_storage.setdefault(piece.param, []).append(piece)
    return by_storage
