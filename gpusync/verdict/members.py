"""A group that is named by an address, for engines without a process group of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """A group without a process group of torch: rank 0 of `size` serves the store at (host, port)."""

    rank: int
    size: int
    host: str
    port: int
