"""Pull planning: from which state to start (the seed) and which deltas to apply after it (the chain).

Pure. Takes what a store has applied and a way to look a published version up; returns what to do. Reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpusync.errors import ChainError, MissingLinkError, VersionMissingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one published index says about its place in the stream. `base_version` is None for a full version.

    `digest` tells it from another version under the same number; None where that cannot be told now.
    """

    version: int
    base_version: int | None
    digest: str | None
    stream_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a store holds. `version` is None when it holds nothing that a delta could be applied to.

    `digests` maps versions the store went through to the digest they were published with.
    """

    version: int | None = None
    stream_id: str | None = None
    digests: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Start from `seed` at `seed_version`, then apply `chain` in ascending order; the result is `target`.

    `seed` is "store" (what the store holds, nothing is copied), "full" (the published full version) or "base" (the
    engine's own checkpoint, version 0). `reason` says why, for the report.
    """

    target: int
    seed: Literal["store", "full", "base"]
    seed_version: int
    chain: tuple[int, ...]
    reason: str

    @property
    def reseeds(self) -> bool:
        return self.seed != "store"

    @property
    def is_nothing(self) -> bool:
        return self.seed == "store" and not self.chain


Lookup = Callable[[int], "Link | None"]


def plan_pull(*, applied: Applied, target: int, lookup: Lookup, allow_rewind: bool = False) -> Plan:
    """Plan the way from `applied` to `target`.

    `lookup(version)` returns the published link, or None when that version is not there. Raises VersionMissingError
    when the target is not there, MissingLinkError when a version between seed and target is not, ChainError when the
    target lies behind the store without `allow_rewind`, or when links of different streams are chained.
    """
    if target < 0:
        raise ChainError("a target version is 0 or more", expected="0 or more", found=target)
    if target == 0:
        return Plan(target=0, seed="base", seed_version=0, chain=(), reason="version 0 is the engine's own base")
    distrust = "the store holds no version" if applied.version is None else _why_restarted(applied, target, lookup)
    if distrust is None and applied.version is not None:
        if target == applied.version:
            return Plan(target=target, seed="store", seed_version=target, chain=(), reason="already at the target")
        if target < applied.version:
            if not allow_rewind:
                raise ChainError(
                    "the target lies behind the local version, and going back needs `allow_rewind`",
                    version=target,
                    expected=f"a target of {applied.version} or more",
                    found=target,
                )
            distrust = f"rewinding from version {applied.version}"
    start = applied.version if distrust is None else None
    seed_version, is_full, chain = _walk_back(target=target, start=start, lookup=lookup)
    if seed_version == start and distrust is None:
        return Plan(target=target, seed="store", seed_version=seed_version, chain=chain, reason="continues the store")
    reason = distrust or f"the chain passes version {start} by and starts at version {seed_version}"
    kind: Literal["full", "base"] = "full" if is_full else "base"
    return Plan(target=target, seed=kind, seed_version=seed_version, chain=chain, reason=reason)


def _why_restarted(applied: Applied, target: int, lookup: Lookup) -> str | None:
    """A reason not to build on the store: the stream it followed is no longer the one that is published.

    The target and the store's own version are looked at; either may have been pruned, which proves nothing.
    """
    for version in dict.fromkeys((target, applied.version)):
        link = lookup(version) if version else None
        if link is None:
            continue
        if applied.stream_id is not None and link.stream_id is not None and link.stream_id != applied.stream_id:
            return f"the stream was restarted: stream {link.stream_id} replaced {applied.stream_id}"
        known = applied.digests.get(link.version)
        if None not in (known, link.digest) and known != link.digest:
            return f"the stream was restarted: version {link.version} was published anew"
    return None


def _walk_back(*, target: int, start: int | None, lookup: Lookup) -> tuple[int, bool, tuple[int, ...]]:
    """Follow base_version links from `target` to `start`, a full version or 0: (where it ended, is full, chain)."""
    chain: list[int] = []
    at, above = target, None
    while at != start and at != 0:
        link = lookup(at)
        if link is None and above is None:
            raise VersionMissingError("the target version is not published", version=at)
        if link is None:
            raise MissingLinkError(f"the chain to version {target} needs a version that is not there", version=at)
        if above is not None and None not in (above.stream_id, link.stream_id) and above.stream_id != link.stream_id:
            raise ChainError(
                f"version {above.version} builds on a version of another stream",
                version=at,
                expected=f"stream {above.stream_id}",
                found=f"stream {link.stream_id}",
            )
        if link.base_version is None:
            return at, True, tuple(reversed(chain))
        chain.append(at)
        at, above = link.base_version, link
    return at, False, tuple(reversed(chain))
