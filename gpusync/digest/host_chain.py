"""XXH3 chains on the host. Many are advanced together, one numpy operation over all of them; few, or the rest of the
longest, one by one: numpy takes longer to begin an operation on eight numbers than Python takes for it on one number
that has all eight lanes in it.

    lane i is in bits 104 i .. 104 i + 63; between lanes there is room for what a product carries
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusync_kernels.chain import Links, advance_reference
from gpusync_kernels.xxh3 import LANES, PRIME32, SCRAMBLE_KEY, SumsLayout

U64 = npt.NDArray[np.uint64]

FEW_CHAINS = 10
SHORT_CHAIN = 16  # not worth packing
CHUNK_BLOCKS = 1024

LANE_BYTES = 13
_NUMBER_BYTES = LANES * LANE_BYTES


def advance_on_host(layout: SumsLayout, sums: U64, links: Links) -> U64:
    """`gpusync_kernels.chain.advance` for sums in numpy, and the same result."""
    steps = links.stop_block - links.first_block
    longest = np.sort(steps)[::-1]
    together = int(longest[FEW_CHAINS]) if len(steps) > FEW_CHAINS else 0
    if longest[:1].sum() - together < SHORT_CHAIN:
        return advance_reference(layout, sums, links)
    middle = links.first_block + np.minimum(steps, together)
    lanes = advance_reference(layout, sums, Links(links.lanes, links.first_block, middle))
    for chain in np.flatnonzero(steps > together).tolist():
        first = layout.first_row[chain] + middle[chain]
        lanes[chain] = _advance_one(sums[first : first + steps[chain] - together], lanes[chain])
    return lanes


def _advance_one(sums: U64, lanes: U64) -> U64:
    number = _number(lanes)
    for first in range(0, len(sums), CHUNK_BLOCKS):
        packed = _packed(sums[first : first + CHUNK_BLOCKS])
        for start in range(0, len(packed), _NUMBER_BYTES):
            number += int.from_bytes(packed[start : start + _NUMBER_BYTES], "little")
            # the carry of the sum, bit 64, stays above what counts, and goes after the product
            number = ((number ^ (number >> 47 & _SHIFTED) ^ _KEY) * PRIME32[0]) & _MASK
    unpacked = np.frombuffer(number.to_bytes(_NUMBER_BYTES, "little"), np.uint8).reshape(LANES, LANE_BYTES)
    return np.ascontiguousarray(unpacked[:, :8]).view("<u8").reshape(-1)


def _packed(rows: U64) -> bytes:
    """A number of `_NUMBER_BYTES` for each row of eight lanes."""
    spread = np.zeros((len(rows), LANES, LANE_BYTES), np.uint8)
    spread[:, :, :8] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, LANES, 8)
    return spread.tobytes()


def _number(lanes: U64) -> int:
    return int.from_bytes(_packed(lanes[None]), "little")


_MASK = _number(np.full(LANES, 2**64 - 1, np.uint64))
_SHIFTED = _number(np.full(LANES, 2**17 - 1, np.uint64))
_KEY = _number(SCRAMBLE_KEY)
