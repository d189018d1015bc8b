"""Which versions may go, as a table of cases and as a property: a reader cannot tell that anything went."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import GpusyncError, PublishError
from gpusync.plan import Applied, Link, Plan, plan_pull
from gpusync.publish import plan_prune


def stream(*links: tuple[int, int | None], stream_id: str | None = None) -> dict[int, Link]:
    return {v: Link(version=v, base_version=base, digest=f"d{v}", stream_id=stream_id) for v, base in links}


def deltas(first: int, last: int) -> list[tuple[int, int | None]]:
    return [(version, version - 1) for version in range(first, last + 1)]


DELTAS = stream(*deltas(1, 6))
# A full version every five: 5 and 10.
ANCHORED = stream(*deltas(1, 4), (5, None), *deltas(6, 9), (10, None), *deltas(11, 12))
SHORTCUT = stream(*deltas(1, 4), (5, None), *deltas(6, 8), (9, 3))


@pytest.mark.parametrize(
    ("published", "keep_last", "keep_full_every", "removed"),
    [
        ({}, 3, 0, []),
        # without a full version the newest needs the chain back to the base
        (DELTAS, 1, 0, []),
        (DELTAS, 1, 2, []),
        (ANCHORED, 1, 0, range(1, 10)),
        (ANCHORED, 2, 0, range(1, 10)),
        # 9, the fourth newest, stands on 5
        (ANCHORED, 4, 0, range(1, 5)),
        (ANCHORED, 7, 0, range(1, 5)),
        (ANCHORED, 9, 0, []),
        (ANCHORED, 99, 0, []),
        (ANCHORED, 1, 5, [1, 2, 3, 4, 6, 7, 8, 9]),
        # one full version of every ten numbers: 5 of the first ten, 10 of the second
        (ANCHORED, 1, 10, [1, 2, 3, 4, 6, 7, 8, 9]),
        (ANCHORED, 1, 20, [1, 2, 3, 4, 6, 7, 8, 9]),
        (stream((1, None), (2, None), (3, None), (4, None)), 1, 3, [2]),
        # a shortcut keeps the older base that it stands on, and what is under that
        (SHORTCUT, 1, 0, range(4, 9)),
        (SHORTCUT, 2, 0, [4]),
        # pruned before, from below: the anchor is there
        (stream((5, None), *deltas(6, 8)), 1, 0, []),
        # what is missing may come: nothing below it goes
        (stream((1, None), (2, 1), (3, None), (5, 4), (6, 5)), 1, 0, []),
        (stream((1, None), (2, 1), (3, None), (5, 4), (6, None), (7, 6)), 1, 0, [1, 2, 3, 5]),
        (stream((999_999, None), (1_000_000, 999_999), (1_000_001, None)), 1, 0, [999_999, 1_000_000]),
    ],
)
def test_what_goes(published: dict[int, Link], keep_last: int, keep_full_every: int, removed: list[int]) -> None:
    plan = plan_prune(published.values(), keep_last=keep_last, keep_full_every=keep_full_every)
    assert list(plan.remove) == sorted(removed, reverse=True)
    assert list(plan.keep) == sorted(published.keys() - set(removed))


def test_it_says_why_a_version_stays() -> None:
    plan = plan_prune(ANCHORED.values(), keep_last=1, keep_full_every=5)
    assert plan.keep == {5: "anchor", 10: "anchor", 11: "needed", 12: "newest"}
    gap = stream((1, None), (2, 1), (4, 3))
    assert plan_prune(gap.values(), keep_last=1).keep == {1: "unsure", 2: "unsure", 4: "newest"}


def test_each_run_in_one_place_counts_by_itself() -> None:
    """A new run began again at 1; the old one's higher numbers must not make its versions look old."""
    old = stream((4, None), *deltas(5, 9), stream_id="old")
    new = stream((1, None), *deltas(2, 3), stream_id="new")
    plan = plan_prune([*old.values(), *new.values()], keep_last=2)
    assert plan.remove == ()
    again = stream((1, None), (2, 1), (3, None), stream_id="new")
    assert plan_prune([*old.values(), *again.values()], keep_last=1).remove == (2, 1)


@pytest.mark.parametrize(("keep_last", "keep_full_every"), [(0, 0), (-1, 0), (1, -1)])
def test_counts_that_keep_nothing_are_refused(keep_last: int, keep_full_every: int) -> None:
    with pytest.raises(PublishError):
        plan_prune(DELTAS.values(), keep_last=keep_last, keep_full_every=keep_full_every)


@st.composite
def streams(draw: st.DrawFn) -> dict[int, Link]:
    """Deltas on any older version, full versions, gaps, and now and then a second run."""
    bases = draw(st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=1, max_size=14))
    ids = draw(
        st.lists(st.sampled_from(["run", "run", "run", "other", None]), min_size=len(bases), max_size=len(bases))
    )
    gaps = draw(st.sets(st.integers(1, 14), max_size=2))
    links = {}
    for n, (base, stream_id) in enumerate(zip(bases, ids, strict=True), start=1):
        if n not in gaps:
            base_version = None if base is None else (n - 1 if base > 20 else base % n)
            links[n] = Link(version=n, base_version=base_version, digest=f"d{n}", stream_id=stream_id)
    return links


def way(published: Mapping[int, Link], reader: int | None, target: int, known: Mapping[int, Link]) -> Plan | str:
    """How a reader that holds version `reader` (None: nothing) gets to `target`, or the error it gets."""
    link = None if reader is None else known.get(reader)
    held = Applied(
        version=reader,
        stream_id=None if link is None else link.stream_id,
        digests={} if link is None else {link.version: link.digest},
    )
    try:
        return plan_pull(applied=held, target=target, lookup=published.get, allow_rewind=True)
    except GpusyncError as error:
        return str(error)


@given(published=streams(), keep_last=st.integers(1, 5), keep_full_every=st.integers(0, 6))
def test_no_reader_can_tell(published: dict[int, Link], keep_last: int, keep_full_every: int) -> None:
    """Every version that stays is reached as before from any version at all, at every moment of the removal too."""
    plan = plan_prune(published.values(), keep_last=keep_last, keep_full_every=keep_full_every)
    assert plan.keep.keys() | set(plan.remove) == published.keys()
    assert len(plan.keep) + len(plan.remove) == len(published)
    assert {*sorted(published)[-1:]} <= plan.keep.keys()
    left = dict(published)
    for gone in (None, *plan.remove):
        left.pop(gone or 0, None)
        for target in left:
            assert way(left, None, target, published) == way(published, None, target, published)
            for reader in range(15):
                assert way(left, reader, target, published) == way(published, reader, target, published)
    # What is kept is kept again, however the stream has grown; running twice changes nothing.
    again = plan_prune(left.values(), keep_last=keep_last, keep_full_every=keep_full_every)
    assert again.remove == ()
