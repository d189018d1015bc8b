"""The serial part of XXH3-128: from block sums to accumulators, digests and fingerprints, for many tensors at once.

An accumulator is eight 64-bit lanes. A rank that holds a contiguous part of a tensor advances the accumulator it was
given over its blocks and passes 64 bytes on; whoever has all sums makes the digest in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Bytes, Ints
from gpusync_kernels.sums import BoundSums, Sums, add_cut_words, block_sums, gather_tails
from gpusync_kernels.xxh3 import (
    AVALANCHE,
    BLOCK_BYTES,
    HIGH_KEY,
    LANES,
    LAST_STRIPE_KEY,
    LOW_KEY,
    PRIME32,
    PRIME64,
    SCRAMBLE_KEY,
    START,
    SumsLayout,
)

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Links:
    """Per tensor: begin with `lanes` (host, uint64 [tensors, 8]) before block `first_block`, stop before
    `stop_block`.
    """

    lanes: U64
    first_block: Ints
    stop_block: Ints

    @classmethod
    def whole(cls, layout: SumsLayout) -> Links:
        """From the start of every tensor over all its whole blocks."""
        return cls(np.tile(START, (len(layout), 1)), np.zeros_like(layout.blocks), layout.blocks)


def advance(layout: SumsLayout, sums: Sums, links: Links) -> U64:
    """The accumulators after the blocks of `links`, uint64 [tensors, 8] on the host."""
    if isinstance(sums, np.ndarray):
        return advance_reference(layout, sums, links)
    from gpusync_kernels.device.chain import launch_advance

    return launch_advance(layout, sums, links)


def chain_digests(layout: SumsLayout, sums: Sums, tails: Any, links: Links | None = None) -> U64:
    """XXH3-128 of every tensor, uint64 [tensors, 2] on the host, low half first. Needs the sums of all bytes.

    `tails`: uint8 [tensors, 64], the last 64 bytes. `links` to begin later, from an accumulator that was passed on.
    """
    links = Links.whole(layout) if links is None else links
    if isinstance(sums, np.ndarray):
        return finish_reference(layout, advance_reference(layout, sums, links), sums, np.asarray(tails))
    from gpusync_kernels.device.chain import launch_digests

    return launch_digests(layout, sums, tails, links)


def fingerprints(bound: BoundSums, sums: Sums = None) -> U64:
    """A digest per tensor of the bytes that this table holds of it, uint64 [tensors, 2]; other bytes count as zero
    sums.

    Equal bytes under the same table give equal fingerprints; no exchange is needed. `sums`, if already made, are
    those of `block_sums(bound)` alone; cut words are added to them.
    """
    sums = block_sums(bound) if sums is None else sums
    add_cut_words(bound, sums)
    return chain_digests(bound.layout, sums, gather_tails(bound), held_blocks(bound))


def held_blocks(bound: BoundSums) -> Links:
    """Per tensor, from the first to the last block that the table holds bytes of: zero sums outside need no chain."""
    rows, layout = bound.table.rows, bound.layout
    rows = rows[(rows["rows"] > 0) & (rows["row_bytes"] > 0)]
    stop_byte = rows["src_offset"] + (rows["rows"] - 1) * rows["src_stride"] + rows["row_bytes"]
    first, stop = layout.blocks.copy(), np.zeros_like(layout.blocks)
    np.minimum.at(first, rows["src"], rows["src_offset"] // BLOCK_BYTES)
    np.maximum.at(stop, rows["src"], -(-stop_byte // BLOCK_BYTES))
    stop = np.minimum(stop, layout.blocks)
    return Links(np.tile(START, (len(layout), 1)), np.minimum(first, stop), stop)


def hex_digests(digests: U64) -> list[str]:
    """As `xxhash.xxh3_128_hexdigest` writes them."""
    return [f"{high:016x}{low:016x}" for low, high in digests.tolist()]


def advance_reference(layout: SumsLayout, sums: U64, links: Links) -> U64:
    """One block step of all tensors at a time, the longest tensors first."""
    steps = links.stop_block - links.first_block
    order = np.argsort(-steps, kind="stable")
    row = (layout.first_row + links.first_block)[order]
    lanes = links.lanes[order].copy()
    running = np.searchsorted(-steps[order], -np.arange(int(steps.max(initial=0))), side="left")
    for step, count in enumerate(running.tolist()):
        part = lanes[:count]
        part += sums[row[:count] + step]
        part ^= (part >> np.uint64(47)) ^ SCRAMBLE_KEY
        part *= np.uint64(PRIME32[0])
    result = np.empty_like(lanes)
    result[order] = lanes
    return result


def finish_reference(layout: SumsLayout, lanes: U64, sums: U64, tails: Bytes) -> U64:
    """The sums after the last whole block, the last stripe, and the merge into 128 bits."""
    last = np.ascontiguousarray(tails).view("<u8").reshape(-1, LANES)
    key = last ^ LAST_STRIPE_KEY
    swapped = last.reshape(-1, LANES // 2, 2)[:, :, ::-1].reshape(-1, LANES)
    lanes = lanes + sums[layout.first_row + layout.blocks]
    lanes += (key & np.uint64(0xFFFFFFFF)) * (key >> np.uint64(32)) + swapped
    size = layout.nbytes.astype(np.uint64)
    low = _merge(lanes, LOW_KEY, size * np.uint64(PRIME64[0]))
    high = _merge(lanes, HIGH_KEY, ~(size * np.uint64(PRIME64[1])))
    return np.stack([low, high], axis=1)


def _merge(lanes: U64, key: U64, start: U64) -> U64:
    mixed = lanes ^ key
    low, high = _multiply(mixed[:, 0::2], mixed[:, 1::2])
    value = start + (low ^ high).sum(axis=1, dtype=np.uint64)
    value ^= value >> np.uint64(37)
    value *= np.uint64(AVALANCHE)
    merged: U64 = value ^ (value >> np.uint64(32))
    return merged


def _multiply(a: U64, b: U64) -> tuple[U64, U64]:
    """The 128-bit product as low and high halves, from four 32-bit products."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = (a & mask) * (b & mask), (a >> half) * (b >> half)
    left, right = (a >> half) * (b & mask), (a & mask) * (b >> half)
    carry = (low >> half) + (left & mask) + (right & mask)
    return a * b, high + (left >> half) + (right >> half) + (carry >> half)
