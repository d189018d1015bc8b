"""Checksums: of tensors as published, of stored payloads, and of tensors that nobody holds whole.

What the last of these needs is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpusync.digest.algorithms import (
    ALGORITHMS,
    PAYLOAD_ALGORITHM,
    Digest,
    digest_of,
    is_checksum,
    is_payload_checksum,
    new_digest,
    payload_checksum,
)

if TYPE_CHECKING:
    from gpusync.digest.exchange import Traffic
    from gpusync.digest.replicas import ReplicaMismatchError
    from gpusync.digest.sharded import DigestReport, Partial, combine, partial, sharded_digest, sharded_digests
    from gpusync.digest.shards import ShardedTensor, Shards
    from gpusync.digest.supply import Supply

__all__ = [
    "ALGORITHMS",
    "PAYLOAD_ALGORITHM",
    "Digest",
    "DigestReport",
    "Partial",
    "ReplicaMismatchError",
    "ShardedTensor",
    "Shards",
    "Supply",
    "Traffic",
    "combine",
    "digest_of",
    "is_checksum",
    "is_payload_checksum",
    "new_digest",
    "partial",
    "payload_checksum",
    "sharded_digest",
    "sharded_digests",
]

_HOMES = {
    "DigestReport": "gpusync.digest.sharded",
    "Partial": "gpusync.digest.sharded",
    "ReplicaMismatchError": "gpusync.digest.replicas",
    "ShardedTensor": "gpusync.digest.shards",
    "Shards": "gpusync.digest.shards",
    "Supply": "gpusync.digest.supply",
    "Traffic": "gpusync.digest.exchange",
    "combine": "gpusync.digest.sharded",
    "partial": "gpusync.digest.sharded",
    "sharded_digest": "gpusync.digest.sharded",
    "sharded_digests": "gpusync.digest.sharded",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
