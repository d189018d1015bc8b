"""Digests of sharded tensors over gpusync's own group: the exchange rounds of `gpusync.digest` as its collectives."""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np

from gpusync.digest import DigestReport, Shards, Traffic
from gpusync.digest.exchange import Bytes, Program, Round, Seat
from gpusync.digest.program import digest_program
from gpusync.verdict import Group

T = TypeVar("T")
BUDGET_BYTES = 256 << 20


def digest_over(group: Group, shards: Shards, *, timeout_s: float, budget_bytes: int = BUDGET_BYTES) -> DigestReport:
    """The checksums of `shards` on every rank. A collective for guarded work, as the group's others; errors as
    `gpusync.digest.sharded_digests`."""
    traffic = Traffic()
    seat = Seat(rank=group.rank, ranks=group.size, budget_bytes=budget_bytes)
    digests = _run(digest_program(lambda: shards, seat), group, traffic, timeout_s)
    return DigestReport(digests=tuple(digests), traffic=traffic)


def _run(program: Program[T], group: Group, traffic: Traffic, timeout_s: float) -> T:
    reply: list[Bytes] | None = None
    while True:
        try:
            sent = next(program) if reply is None else program.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result
        reply = _exchange(sent, group, timeout_s)
        traffic.count(sent.sent)


def _exchange(sent: Round, group: Group, timeout_s: float) -> list[Bytes]:
    """All that every rank has for every other one goes to all; each takes what is for it."""
    sizes = struct.pack(f"<{group.size}q", *(part.size for part in sent.outgoing))
    messages = group.gather_bytes(sizes + b"".join(part.tobytes() for part in sent.outgoing), timeout_s=timeout_s)
    received = []
    for message in messages:
        lengths = struct.unpack_from(f"<{group.size}q", message)
        start = 8 * group.size + sum(lengths[: group.rank])
        received.append(np.frombuffer(message, np.uint8, lengths[group.rank], offset=start))
    return received
