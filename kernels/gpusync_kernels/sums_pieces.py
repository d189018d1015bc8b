"""A segment table cut for the block sums, and laid out for their two kernels. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpusync_kernels.buffers import Ints
from gpusync_kernels.segments import Rows, clip_source, deal_rows, merge_rows, split_rows
from gpusync_kernels.tiling import Launch, is_flat, map_programs, tile_count
from gpusync_kernels.xxh3 import BLOCK_BYTES, LANES, WORD_BYTES, SumsLayout

ITEMS = 32  # blocks that one program sums
SUMS_ROW_BYTES = LANES * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Pieces:
    """A table's bytes, each once. Source offsets are positions in the tensor."""

    blocks: Rows  # rows of whole blocks
    words: Rows  # rows of whole words
    cut: Rows  # rows of less than a word
    beyond: Rows  # what no sum covers: it is in the last stripe


def cut_into_pieces(rows: Rows, layout: SumsLayout) -> Pieces:
    """3,005 bytes from byte 1,000 of a tensor of 5,000 on: two blocks (1024..3071), words before (1000..1023) and after
    them (3072..3999), and a cut word (4000..4004).
    """
    rows = merge_rows(rows)
    covered = layout.word_bytes[rows["src"]]
    inside = deal_rows(clip_source(rows, np.zeros_like(covered), covered), WORD_BYTES)
    beyond = clip_source(rows, covered, layout.nbytes[rows["src"]])
    first, words, last = split_rows(inside, WORD_BYTES, "src")
    long = words["row_bytes"] >= BLOCK_BYTES
    before, blocks, after = split_rows(deal_rows(words[long], BLOCK_BYTES), BLOCK_BYTES, "src")
    return Pieces(blocks, np.concatenate([words[~long], before, after]), np.concatenate([first, last]), beyond)


def demote_unaligned(pieces: Pieces, dst: Ints, payload: Ints | None) -> tuple[Rows, Rows]:
    """Blocks whose bytes 128-bit accesses can reach, on the rank and in the payload; and all other whole words."""
    blocks = pieces.blocks
    aligned = (dst[blocks["dst"]] + blocks["dst_offset"]) % 16 == 0
    aligned &= (blocks["rows"] == 1) | (blocks["dst_stride"] % 16 == 0)
    if payload is not None:
        aligned &= (payload[blocks["src"]] + blocks["src_offset"]) % 16 == 0
    return blocks[aligned], np.concatenate([blocks[~aligned], pieces.words])


def block_launch(blocks: Rows, layout: SumsLayout, dst: Ints, payload: Ints | None) -> Launch:
    """columns: address, stride, payload address, payload stride, sums row, sums rows between rows, blocks per row,
    blocks, first program, 1 if without gaps
    """
    row_blocks = blocks["row_bytes"] // BLOCK_BYTES
    total = blocks["rows"] * row_blocks
    first_program, piece_of_program = map_programs(tile_count(total, ITEMS))
    columns = (
        dst[blocks["dst"]] + blocks["dst_offset"],
        blocks["dst_stride"],
        np.zeros_like(total) if payload is None else payload[blocks["src"]] + blocks["src_offset"],
        blocks["src_stride"],
        layout.first_row[blocks["src"]] + blocks["src_offset"] // BLOCK_BYTES,
        blocks["src_stride"] // BLOCK_BYTES,
        row_blocks,
        total,
        first_program,
        is_flat(blocks),
    )
    return Launch(np.stack(columns, axis=1), piece_of_program)


def word_launches(
    words: Rows, layout: SumsLayout, dst: Ints, *, always_by_bytes: bool = False
) -> list[tuple[bool, Launch]]:
    """At most two launches: words that can be loaded as such, and words to be put together from bytes (True).

    columns: address, stride, position in the tensor, its stride, bytes per row, blocks touched per row, blocks touched,
    first program, first sums row of the tensor
    """
    address = dst[words["dst"]] + words["dst_offset"]
    whole = (address % WORD_BYTES == 0) & ((words["rows"] == 1) | (words["dst_stride"] % WORD_BYTES == 0))
    by_bytes = np.full(len(words), True) if always_by_bytes else ~whole
    return [
        (flag, _word_launch(words[by_bytes == flag], layout, address[by_bytes == flag]))
        for flag in (False, True)
        if (by_bytes == flag).any()
    ]


def _word_launch(words: Rows, layout: SumsLayout, address: Ints) -> Launch:
    alike = (words["rows"] == 1) | (words["src_stride"] % BLOCK_BYTES == 0)
    start = np.where(alike, words["src_offset"] % BLOCK_BYTES, BLOCK_BYTES - 1)
    touched = (start + words["row_bytes"] + BLOCK_BYTES - 1) // BLOCK_BYTES
    total = words["rows"] * touched
    first_program, piece_of_program = map_programs(tile_count(total, ITEMS))
    columns = (
        address,
        words["dst_stride"],
        words["src_offset"],
        words["src_stride"],
        words["row_bytes"],
        touched,
        total,
        first_program,
        layout.first_row[words["src"]],
    )
    return Launch(np.stack(columns, axis=1), piece_of_program)
