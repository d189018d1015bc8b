"""Who holds what of every tensor, as all ranks know it: what is missing, what is held more than once, and whose bytes
make the digest. Pure: every rank comes to the same answers from what all have told.

A holder is a rank, or one of several layers of a rank that holds bytes twice. A tensor that some holder has whole is
digested by each that has. Of others every byte has one primary holder; together they make the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpusync.digest.intervals import (
    ByTensor,
    Ints,
    flat_rows,
    is_exact_cover,
    restrict,
    singles_of,
    sizes_by_tensor,
    span_stops,
)
from gpusync.errors import LayoutError
from gpusync_kernels.segments import Rows


@dataclass(frozen=True, slots=True)
class Replicas:
    """Bytes of a tensor (source side of `region`, without overlap) that each of `holders` has."""

    holders: tuple[int, ...]
    region: Rows


@dataclass(frozen=True, slots=True)
class Pattern:
    """What tensors of one size with one distribution have in common.

    `whole`: holders of all bytes. `primary`: holders whose segments all count, if nobody has it whole; `parts`: holders
    of whose segments only those inside the given ones count.
    """

    nbytes: int
    whole: tuple[int, ...] = ()
    primary: tuple[int, ...] = ()
    parts: dict[int, Rows] = field(default_factory=dict)
    replicas: tuple[Replicas, ...] = ()


class Ownership:
    """`ranks[r]` are rank r's layers, as `shards.published` makes them.

    `holders`: (rank, layer) of each. `patterns[pattern_of[t]]` is tensor t's.
    Raises `LayoutError`, on every rank the same, naming the first tensor that has a byte on no rank.
    """

    def __init__(self, ranks: Sequence[Sequence[Rows]], nbytes: Ints, names: Sequence[str]) -> None:
        self.nbytes, self.names = nbytes, tuple(names)
        self.holders = [(rank, layer) for rank, layers in enumerate(ranks) for layer in range(len(layers))]
        self.rows = [ByTensor(rows, len(nbytes)) for layers in ranks for rows in layers]
        self.patterns: list[Pattern] = []
        self.pattern_of = self._find_patterns()

    def tensors_with(self, wanted: Sequence[bool]) -> Ints:
        """The tensors whose pattern, by number, is wanted."""
        return np.flatnonzero(np.asarray(wanted, bool)[self.pattern_of])

    @property
    def distributed(self) -> Ints:
        """The tensors that no holder has whole."""
        return self.tensors_with([not pattern.whole for pattern in self.patterns])

    def primary_rows(self, holder: int, rows: Rows) -> Rows:
        """Of `rows`, the holder's own or as it published them, those by which it takes part in digests of others."""
        counts = np.array([holder in pattern.primary for pattern in self.patterns], np.bool_)
        found = [rows[counts[self.pattern_of[rows["src"]]]]]
        cut = self.tensors_with([holder in pattern.parts for pattern in self.patterns])
        table = ByTensor(rows, len(self.nbytes)) if len(cut) else None
        for tensor in cut.tolist():
            if table is not None:
                found.append(restrict(table.slice(tensor), self.patterns[self.pattern_of[tensor]].parts[holder]))
        return np.concatenate(found)

    def _find_patterns(self) -> Ints:
        sizes = np.stack([sizes_by_tensor(table.rows, len(self.nbytes)) for table in self.rows])
        known: dict[tuple[object, ...], int] = {}
        numbers = np.zeros(len(self.nbytes), np.int64)
        plain = [_without_tensor(table.rows) for table in self.rows]
        for tensor, nbytes in enumerate(self.nbytes.tolist()):
            holding = np.flatnonzero(sizes[:, tensor]).tolist()
            rows = {h: plain[h][self.rows[h].starts[tensor] : self.rows[h].starts[tensor + 1]] for h in holding}
            key = (nbytes, *((h, part.tobytes()) for h, part in rows.items()))
            if key not in known:
                known[key] = len(self.patterns)
                self.patterns.append(_pattern(rows, nbytes, self.names[tensor]))
            numbers[tensor] = known[key]
        return numbers


def _without_tensor(rows: Rows) -> Rows:
    rows = rows.copy()
    rows["src"] = 0
    return rows


def _pattern(rows: dict[int, Rows], nbytes: int, name: str) -> Pattern:
    """`rows`: the segments, `src` 0, of each holder that has any."""
    groups: dict[bytes, list[int]] = {}
    for holder, part in rows.items():
        groups.setdefault(part.tobytes(), []).append(holder)
    alike = [tuple(group) for group in groups.values()]
    whole = tuple(h for h, part in rows.items() if int((part["rows"] * part["row_bytes"]).sum()) == nbytes)
    if whole:
        # those who have all of it compare digests; everyone else compares with the first of them
        partly = [group for group in alike if group[0] not in whole]
        replicas = tuple(Replicas((*group, whole[0]), rows[group[0]]) for group in partly)
        return Pattern(nbytes, whole=whole, replicas=replicas)
    first = [group[0] for group in alike]
    together = np.concatenate([rows[h] for h in first]) if first else flat_rows([], [])
    if is_exact_cover(together, nbytes):
        replicas = tuple(Replicas(group, rows[group[0]]) for group in alike if len(group) > 1)
        return Pattern(nbytes, primary=tuple(first), replicas=replicas)
    return _cut_pattern(alike, rows, nbytes, name)


def _cut_pattern(alike: list[tuple[int, ...]], rows: dict[int, Rows], nbytes: int, name: str) -> Pattern:
    """The tensor cut at every boundary of every holder; the first group that has a piece is its primary one."""
    singles = [singles_of(rows[group[0]]) for group in alike]
    edges = [each for single in singles for each in (single["src_offset"], span_stops(single))]
    cuts = np.unique(np.concatenate([np.array([0, nbytes]), *edges]))
    starts, stops = cuts[:-1], cuts[1:]
    held = np.zeros((len(singles), len(starts)), np.bool_)
    for number, single in enumerate(singles):
        change = np.zeros(len(cuts), np.int64)
        change[np.searchsorted(cuts, single["src_offset"])] += 1
        change[np.searchsorted(cuts, span_stops(single))] -= 1
        held[number] = change.cumsum()[:-1] > 0
    missing = ~held.any(axis=0)
    if missing.any():
        byte = int(starts[np.argmax(missing)])
        raise LayoutError(
            "a byte is on no rank", tensor=name, expected=f"all of its {nbytes} bytes", found=f"none from {byte} on"
        )
    owner = held.argmax(axis=0)
    parts = {group[0]: _joined(starts, stops, owner == number) for number, group in enumerate(alike)}
    replicas = []
    for column in np.unique(held, axis=1).T:
        holders = tuple(sorted(h for number in np.flatnonzero(column) for h in alike[number]))
        if len(holders) > 1:
            here = (held == column[:, None]).all(axis=0)
            replicas.append(Replicas(holders, _joined(starts, stops, here)))
    return Pattern(nbytes, parts={h: region for h, region in parts.items() if len(region)}, replicas=tuple(replicas))


def _joined(starts: Ints, stops: Ints, here: npt.NDArray[np.bool_]) -> Rows:
    """The intervals that are `here`, neighbours as one."""
    change = np.diff(here.astype(np.int8), prepend=0, append=0)
    first, last = np.flatnonzero(change > 0), np.flatnonzero(change < 0) - 1
    return flat_rows(starts[first], stops[last])
