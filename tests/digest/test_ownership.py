"""Whose bytes make a digest, who has them as well, and what nobody has."""

import numpy as np
import pytest
from owners import KINDS, share_out

from gpusync.digest.intervals import flat_rows
from gpusync.digest.ownership import Ownership
from gpusync.errors import LayoutError


def ownership(nbytes: int, *ranks) -> Ownership:
    layers = [[flat_rows(*np.array(sorted(ranges), np.int64).reshape(-1, 2).T)] for ranges in ranks]
    return Ownership(layers, np.array([nbytes]), ["w"])


def ranges_of(rows) -> list[tuple[int, int]]:
    return list(zip(rows["src_offset"].tolist(), (rows["src_offset"] + rows["row_bytes"]).tolist(), strict=True))


def test_who_has_all_of_it_digests_it_and_the_rest_compare_with_the_first():
    (pattern,) = ownership(10, [(0, 10)], [(2, 4)], [(0, 10)], [(2, 4)]).patterns
    assert pattern.whole == (0, 2)
    assert (pattern.primary, pattern.parts) == ((), {})
    assert [(r.holders, ranges_of(r.region)) for r in pattern.replicas] == [((1, 3, 0), [(2, 4)])]


def test_of_equal_shares_the_first_counts_and_all_are_compared():
    (pattern,) = ownership(10, [(0, 5)], [(5, 10)], [(5, 10)], [(0, 5)]).patterns
    assert pattern.primary == (0, 1)
    assert [(r.holders, ranges_of(r.region)) for r in pattern.replicas] == [((0, 3), [(0, 5)]), ((1, 2), [(5, 10)])]


def test_overlaps_are_cut_at_every_boundary():
    owned = ownership(10, [(0, 6)], [(4, 10)], [(5, 6)])
    (pattern,) = owned.patterns
    assert {h: ranges_of(region) for h, region in pattern.parts.items()} == {0: [(0, 6)], 1: [(6, 10)]}
    assert sorted((r.holders, ranges_of(r.region)) for r in pattern.replicas) == [
        ((0, 1), [(4, 5)]),
        ((0, 1, 2), [(5, 6)]),
    ]
    assert ranges_of(owned.primary_rows(1, flat_rows([4], [10]))) == [(6, 10)]
    assert len(owned.primary_rows(2, flat_rows([5], [6]))) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [1, 17, 1000, 5000])
def test_every_byte_has_one_primary_owner_and_all_its_holders_are_compared(kind, nbytes):
    for seed in range(5):
        shares = [_joined(ranges) for ranges in share_out(kind, nbytes, 4, seed)]
        owned = ownership(nbytes, *shares)
        (pattern,) = owned.patterns
        times, holders = np.zeros(nbytes, int), [set() for _ in range(nbytes)]
        for holder, ranges in enumerate(shares):
            for first, stop in ranges_of(owned.primary_rows(holder, owned.rows[holder].rows)):
                times[first:stop] += 1
            for byte in (byte for first, stop in ranges for byte in range(first, stop)):
                holders[byte].add(holder)
        assert (times == (0 if pattern.whole else 1)).all()
        compared = [set(pattern.whole) if len(pattern.whole) > 1 else set() for _ in range(nbytes)]
        for replicas in pattern.replicas:
            for first, stop in ranges_of(replicas.region):
                for byte in range(first, stop):
                    compared[byte] |= set(replicas.holders)
        assert [who if len(who) > 1 else set() for who in holders] == compared


def test_tensors_alike_are_looked_at_once():
    rows = np.concatenate([flat_rows([0], [8], tensor) for tensor in range(6)])
    owned = Ownership([[rows[:3]], [rows[3:]]], np.full(6, 8), list("abcdef"))
    assert owned.pattern_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert [pattern.whole for pattern in owned.patterns] == [(0,), (1,)]
    assert owned.distributed.tolist() == []


def test_the_first_tensor_with_a_missing_byte_is_named():
    rows = np.concatenate([flat_rows([0], [8], 0), flat_rows([0, 4], [3, 8], 1), flat_rows([1], [8], 2)])
    with pytest.raises(LayoutError) as caught:
        Ownership([[rows]], np.array([8, 8, 8]), ["a", "b", "c"])
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == (
        "b",
        "all of its 8 bytes",
        "none from 3 on",
    )


def _joined(ranges):
    """Disjoint ranges with the same bytes."""
    joined = []
    for first, stop in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif first < stop:
            joined.append((first, stop))
    return joined
