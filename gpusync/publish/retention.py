"""Which versions of a stream may go. Pure: takes what is published, returns what stays and why. Reads no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpusync.errors import PublishError
from gpusync.plan import Link

# Why a version stays: among the newest, a full one kept for good, one that those build on, or one that may be such
# (a link above it is missing).
Reason = Literal["newest", "anchor", "needed", "unsure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """`keep` tells of every version that stays why it does. `remove` are the others in the order in which they go:
    the newest first, so that whatever is left at any moment lacks no link.
    """

    keep: Mapping[int, Reason]
    remove: tuple[int, ...]


def plan_prune(links: Iterable[Link], *, keep_last: int, keep_full_every: int = 0) -> PrunePlan:
    """Keep the newest `keep_last` versions, the first full version of every `keep_full_every` numbers (0: none for that
    reason alone), and every version that one of these builds on, back to a full version or to the engines' base.

    So a kept version is reached from the same seed over the same chain as before, by a fresh reader and by one that
    holds any version at all. Where nothing kept is full, the chain back to version 0 stays. Runs with a `stream_id` of
    their own count by themselves: which of them is live cannot be told by the numbers. Where a link is missing, all
    below it stays: what is missing may only be late. Raises PublishError for counts that keep nothing.
    """
    if keep_last < 1 or keep_full_every < 0:
        expected = "keep_last of 1 or more, keep_full_every of 0 or more"
        raise PublishError("a stream cannot be pruned so", expected=expected, found=f"{keep_last}, {keep_full_every}")
    published = {link.version: link for link in links}
    keep: dict[int, Reason] = dict.fromkeys(_anchors(published, keep_full_every), "anchor")
    keep.update(dict.fromkeys(_newest(published, keep_last), "newest"))
    for version in sorted(keep):
        _keep_chain(version, published, keep)
    remove = sorted(published.keys() - keep.keys(), reverse=True)
    return PrunePlan(keep=dict(sorted(keep.items())), remove=tuple(remove))


def _newest(published: Mapping[int, Link], count: int) -> list[int]:
    by_stream: dict[str | None, list[int]] = {}
    for version in sorted(published):
        by_stream.setdefault(published[version].stream_id, []).append(version)
    return [version for versions in by_stream.values() for version in versions[-count:]]


def _anchors(published: Mapping[int, Link], every: int) -> list[int]:
    first: dict[tuple[str | None, int], int] = {}
    for version in sorted(published) if every else ():
        if published[version].base_version is None:
            first.setdefault((published[version].stream_id, version // every), version)
    return list(first.values())


def _keep_chain(version: int, published: Mapping[int, Link], keep: dict[int, Reason]) -> None:
    """Add what `version` builds on to `keep`. What is in there already is followed for itself."""
    at = published[version].base_version
    while at and at not in keep:
        if at not in published:
            for older in published:
                if older < at:
                    keep.setdefault(older, "unsure")
            return
        keep[at] = "needed"
        at = published[at].base_version
