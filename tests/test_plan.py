"""Plans, as a table of cases: what is published, what is applied, what follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import ChainError, MissingLinkError, VersionMissingError
from gpusync.plan import Applied, Link, Plan, plan_pull


def stream(*links: tuple[int, int | None], stream_id: str | None = None, run: str = "a") -> dict[int, Link]:
    return {
        version: Link(version=version, base_version=base, digest=f"{run}{version}", stream_id=stream_id)
        for version, base in links
    }


def applied(version: int | None, *seen: int, stream_id: str | None = None, run: str = "a") -> Applied:
    return Applied(version=version, stream_id=stream_id, digests={v: f"{run}{v}" for v in (*seen, version) if v})


DELTAS = stream((1, 0), (2, 1), (3, 2), (4, 3))
WITH_FULL = stream((1, 0), (2, 1), (3, None), (4, 3), (5, 4))


def planned(
    published: dict[int, Link], store: Applied, target: int, **options: bool
) -> tuple[str, int, tuple[int, ...]]:
    plan = plan_pull(applied=store, target=target, lookup=published.get, **options)
    return plan.seed, plan.seed_version, plan.chain


@pytest.mark.parametrize(
    ("published", "store", "target", "expected"),
    [
        (DELTAS, Applied(), 3, ("base", 0, (1, 2, 3))),
        (DELTAS, applied(1), 3, ("store", 1, (2, 3))),
        (DELTAS, applied(3), 3, ("store", 3, ())),
        (DELTAS, applied(0), 1, ("store", 0, (1,))),
        (DELTAS, applied(3), 0, ("base", 0, ())),
        (WITH_FULL, Applied(), 2, ("base", 0, (1, 2))),
        (WITH_FULL, Applied(), 3, ("full", 3, ())),
        (WITH_FULL, Applied(), 5, ("full", 3, (4, 5))),
        (WITH_FULL, applied(2), 5, ("full", 3, (4, 5))),
        (WITH_FULL, applied(3), 5, ("store", 3, (4, 5))),
        (WITH_FULL, applied(4), 5, ("store", 4, (5,))),
        # pruned below the full version: nothing older is looked at
        (stream((3, None), (4, 3), (5, 4)), Applied(), 5, ("full", 3, (4, 5))),
        # the store's own version was pruned: its successor still says what it builds on
        (stream((4, 3)), applied(3), 4, ("store", 3, (4,))),
        # a shortcut past the store's version: reseeded from where the chain ends
        (stream((1, 0), (2, 1), (3, 2), (4, 1)), applied(3), 4, ("base", 0, (1, 4))),
        (stream((1, None), (2, 1), (4, 1)), applied(2), 4, ("full", 1, (4,))),
    ],
)
def test_seed_and_chain(
    published: dict[int, Link], store: Applied, target: int, expected: tuple[str, int, tuple[int, ...]]
) -> None:
    assert planned(published, store, target) == expected


def test_a_missing_target_may_be_retried() -> None:
    with pytest.raises(VersionMissingError) as caught:
        plan_pull(applied=Applied(), target=9, lookup=DELTAS.get)
    assert caught.value.version == 9
    assert not isinstance(caught.value, ChainError)


def test_a_gap_names_the_missing_version() -> None:
    with pytest.raises(MissingLinkError, match="chain to version 7") as caught:
        plan_pull(applied=Applied(), target=7, lookup=stream((6, 5), (7, 6)).get)
    assert caught.value.version == 5


def test_a_target_behind_the_store_is_refused() -> None:
    with pytest.raises(ChainError, match="behind") as caught:
        plan_pull(applied=applied(3, 1, 2), target=2, lookup=DELTAS.get)
    assert (caught.value.version, caught.value.found) == (2, 2)


def test_rewinding_reseeds() -> None:
    assert planned(DELTAS, applied(3, 1, 2), 2, allow_rewind=True) == ("base", 0, (1, 2))


def test_a_negative_target_is_refused() -> None:
    with pytest.raises(ChainError):
        plan_pull(applied=Applied(), target=-1, lookup=DELTAS.get)


@pytest.mark.parametrize("target", [2, 3, 4])
@pytest.mark.parametrize("ids", [("old", "new"), (None, None)], ids=["stream ids", "index digests"])
def test_a_restarted_stream_is_never_chained_onto(target: int, ids: tuple[str | None, str | None]) -> None:
    """Version numbers restart with a new run; the store's bytes are the old run's, whatever its number says."""
    published = stream((1, 0), (2, 1), (3, 2), (4, 3), stream_id=ids[1], run="b")
    store = applied(3, 1, 2, stream_id=ids[0], run="a")
    plan = plan_pull(applied=store, target=target, lookup=published.get)
    assert (plan.seed, plan.chain) == ("base", tuple(range(1, target + 1)))
    assert "restarted" in plan.reason


def test_a_chain_across_streams_is_refused() -> None:
    published = stream((1, 0), (2, 1), stream_id="old") | stream((3, 2), stream_id="new")
    with pytest.raises(ChainError, match="another stream") as caught:
        plan_pull(applied=Applied(), target=3, lookup=published.get)
    assert caught.value.version == 2


@st.composite
def streams(draw: st.DrawFn) -> dict[int, Link]:
    bases = draw(st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=1, max_size=12))
    return stream(*((n, base if base is None else base % n) for n, base in enumerate(bases, start=1)))


@given(
    published=streams(), target=st.integers(0, 13), store=st.one_of(st.none(), st.integers(0, 13)), rewind=st.booleans()
)
def test_every_plan_is_a_way_to_the_target(
    published: dict[int, Link], target: int, store: int | None, rewind: bool
) -> None:
    """Whatever is published: each delta of a plan builds on what stands before it, and the last is the target."""
    try:
        plan: Plan = plan_pull(applied=applied(store), target=target, lookup=published.get, allow_rewind=rewind)
    except (ChainError, VersionMissingError):
        return
    at = plan.seed_version
    if plan.seed == "full":
        assert published[at].base_version is None
    elif plan.seed == "base":
        assert at == 0
    else:
        assert at == store
    for version in plan.chain:
        assert published[version].base_version == at
        at = version
    assert at == target
