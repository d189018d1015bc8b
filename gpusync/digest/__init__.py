"""Checksums: of tensors as published, and of stored payloads."""

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

__all__ = [
    "ALGORITHMS",
    "PAYLOAD_ALGORITHM",
    "Digest",
    "digest_of",
    "is_checksum",
    "is_payload_checksum",
    "new_digest",
    "payload_checksum",
]
