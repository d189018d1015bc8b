"""The format names an index may use, and how large a payload of each can be."""

from __future__ import annotations

from gpusync.digest import ALGORITHMS

XOR = "xor"
OVERWRITE = "overwrite"
GPUSYNC = "gpusync"

ZSTD = "zstd"
NO_COMPRESSION = "none"

COMPRESSION_OF = {XOR: ZSTD, OVERWRITE: ZSTD, GPUSYNC: NO_COMPRESSION}
"""The one `compression_format` that goes with each `delta_encoding`."""

CHECKSUM_FORMATS: tuple[str, ...] = ALGORITHMS

PAYLOAD_DTYPE = "U8"


def max_payload_bytes(encoding: str, nbytes: int) -> int:
    """No honest payload for a tensor of `nbytes` bytes is longer, whatever changed.

    It keeps a reader from fetching gigabytes for a tensor of a kilobyte.
    """
    if encoding == XOR:
        return _zstd_bound(nbytes)
    if encoding == OVERWRITE:
        return _zstd_bound(4 + 5 * nbytes)  # count, and a position and a value for every byte
    return 2 * nbytes + (1 << 20)


def _zstd_bound(nbytes: int) -> int:
    """zstd's own ZSTD_compressBound, and room for a frame that was flushed now and then."""
    return nbytes + (nbytes >> 8) + (max(0, (128 << 10) - nbytes) >> 11) + 1024
