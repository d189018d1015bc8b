"""Block sums of XXH3 for the bytes that a rank holds: destination = the rank's bytes, source = their tensor.

A table is cut into pieces (`sums_pieces.py`): whole blocks, whose sums are written; other whole words, which are added,
since several pieces may share a block; and cut words, of which a row holds only some bytes. A cut word contributes
nothing to a digest until its bytes are together (the caller exchanges them); to a fingerprint it contributes with zeros
for what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Buffer, Bytes, Ints, addresses_of, byte_view, device_of, sizes_of
from gpusync_kernels.copy import copy_segments
from gpusync_kernels.moves import Moves, check_side, strided_view
from gpusync_kernels.segments import Column, Rows, SegmentTable, chunks_of, deal_rows
from gpusync_kernels.sums_pieces import Pieces, block_launch, cut_into_pieces, demote_unaligned, word_launches
from gpusync_kernels.xor import xor_reference
from gpusync_kernels.xxh3 import BLOCK_BYTES, LANES, STRIPE_BYTES, STRIPE_KEYS, WORD_BYTES, SumsLayout

BLOCK_WORDS = BLOCK_BYTES // WORD_BYTES
CHUNK_BLOCKS = 512  # read at a time by the reference
CACHED_BLOCKS = 128  # summed at a time: what stays in a cache
CHUNK_WORDS = CACHED_BLOCKS * BLOCK_WORDS
FEW_ROWS = 8  # not worth dealing out by where they begin in a block

U64 = npt.NDArray[np.uint64]
_CHUNK_KEYS = np.repeat(STRIPE_KEYS[:, None], CACHED_BLOCKS, axis=1)

Sums = Any
"""uint64 [allocated_rows, 8] in numpy; on a device int64 with the same bits, in torch."""


class BoundSums:
    """Made by `bind_sums`. `device` is None when the buffers lie in host memory."""

    def __init__(
        self,
        table: SegmentTable,
        layout: SumsLayout,
        *,
        dst: Sequence[Buffer],
        payload: Sequence[Buffer] = (),
        payload_start: Column = 0,
    ) -> None:
        self.table, self.layout = table, layout
        self.dst, self.payload = tuple(dst), tuple(payload)
        self.payload_start = np.broadcast_to(np.asarray(payload_start, np.int64), (len(layout),))
        self.device = device_of((*self.dst, *self.payload))
        check_side(table.rows, "dst", sizes_of(self.dst))
        check_side(table.rows, "src", layout.nbytes)
        self.pieces: Pieces = cut_into_pieces(table.rows, layout)
        self.moves = self._payload_moves(table.rows) if self.payload else None

    def zeros(self) -> Sums:
        """An array for the sums of the whole layout."""
        if self.device is None:
            return np.zeros((self.layout.allocated_rows, LANES), np.uint64)
        from gpusync_kernels.device.launch import zeros

        return zeros((self.layout.allocated_rows, LANES), self.device)

    def upload(self) -> None:
        """Puts the tables on the device now, so that operations have nothing left to do but launch."""
        if self.device is not None:
            _ = self.block_tables, self.word_tables, self.cut_tables
        for moves in (self.tails[1], self.unfused if self.payload else None):
            if moves is not None:
                moves.upload()

    @cached_property
    def tails(self) -> tuple[Any, Moves]:
        """A buffer [tensors, 64] for the last bytes of every tensor, and the copy that fills it."""
        shape = (len(self.layout), STRIPE_BYTES)
        if self.device is None:
            buffer: Any = np.zeros(shape, np.uint8)
        else:
            from gpusync_kernels.device.launch import zeros

            buffer = zeros(shape, self.device, np.uint8)
        start = self.layout.nbytes - STRIPE_BYTES
        rows = self.table.clipped(start, self.layout.nbytes).swapped().rows.copy()
        rows["dst_offset"] += rows["dst"] * STRIPE_BYTES - start[rows["dst"]]
        rows["dst"] = 0
        return buffer, Moves(SegmentTable(rows), dst=[buffer], src=self.dst)

    def _payload_moves(self, rows: Rows) -> Moves:
        """The xor of these rows: positions in the tensor become positions in its payload."""
        rows = rows.copy()
        rows["src_offset"] -= self.payload_start[rows["src"]]
        return Moves(SegmentTable(rows), dst=self.dst, src=self.payload)

    @cached_property
    def _aligned(self) -> tuple[Rows, Rows, Ints | None]:
        """Blocks that 128-bit accesses reach, every other whole word, and where byte 0 of each tensor's payload is."""
        payload = addresses_of(self.payload) - self.payload_start if self.payload else None
        return *demote_unaligned(self.pieces, addresses_of(self.dst), payload), payload

    @cached_property
    def block_tables(self) -> tuple[Any, Any]:
        from gpusync_kernels.device.launch import upload_launch

        blocks, _, payload = self._aligned
        return upload_launch(block_launch(blocks, self.layout, addresses_of(self.dst), payload), self.device)

    @cached_property
    def word_tables(self) -> list[tuple[bool, Any, Any]]:
        from gpusync_kernels.device.launch import upload_launch

        launches = word_launches(self._aligned[1], self.layout, addresses_of(self.dst))
        return [(by_bytes, *upload_launch(launch, self.device)) for by_bytes, launch in launches]

    @cached_property
    def cut_tables(self) -> list[tuple[bool, Any, Any]]:
        from gpusync_kernels.device.launch import upload_launch

        launches = word_launches(self.pieces.cut, self.layout, addresses_of(self.dst), always_by_bytes=True)
        return [(by_bytes, *upload_launch(launch, self.device)) for by_bytes, launch in launches]

    @cached_property
    def unfused(self) -> Moves:
        """The xor of everything that is no aligned block."""
        return self._payload_moves(np.concatenate([self._aligned[1], self.pieces.cut, self.pieces.beyond]))


def bind_sums(
    table: SegmentTable,
    layout: SumsLayout,
    *,
    dst: Sequence[Buffer],
    payload: Sequence[Buffer] = (),
    payload_start: Column = 0,
) -> BoundSums:
    """The bytes in `dst` as parts of the tensors of `layout`: source t of the table is tensor t, offsets are in it.

    `payload[t]`, for `xor_block_sums`, begins at byte `payload_start[t]` of the tensor (a window of a large one).
    """
    return BoundSums(table, layout, dst=dst, payload=payload, payload_start=payload_start)


def block_sums(bound: BoundSums, sums: Sums = None) -> Sums:
    """The sums over all whole words. `sums` of an earlier call may be handed in: rows of whole blocks are written,
    others added to; each byte of a tensor counts once.
    """
    sums = bound.zeros() if sums is None else sums
    if bound.device is None:
        block_sums_reference(bound, sums)
    else:
        from gpusync_kernels.device.sums import launch_block_sums

        launch_block_sums(bound, sums)
    return sums


def xor_block_sums(bound: BoundSums, sums: Sums = None) -> Sums:
    """Destination bytes become destination ^ payload, and the sums are those of the result: one pass over whole blocks.

    Not idempotent, as `xor_segments`.
    """
    if bound.moves is None:
        raise ValueError("no payload was bound")
    sums = bound.zeros() if sums is None else sums
    if bound.device is None:
        xor_reference(bound.moves)
        block_sums_reference(bound, sums)
    else:
        from gpusync_kernels.device.sums import launch_xor_block_sums

        launch_xor_block_sums(bound, sums)
    return sums


def add_cut_words(bound: BoundSums, sums: Sums) -> None:
    """Adds what the cut words contribute when every byte that is not there counts as zero. For fingerprints only."""
    if bound.device is None:
        cut_words_reference(bound, sums)
    else:
        from gpusync_kernels.device.sums import launch_cut_words

        launch_cut_words(bound, sums)


def gather_tails(bound: BoundSums) -> Any:
    """uint8 [tensors, 64]: the last 64 bytes of every tensor, zero where the table does not hold them."""
    buffer, moves = bound.tails
    copy_segments(moves)
    return buffer.copy() if bound.device is None else buffer.clone()


def add_words(sums: U64, layout: SumsLayout, tensor: int | Ints, word: Column, value: npt.NDArray[np.uint64]) -> None:
    """Adds what words contribute: `value[i]` is the 8-byte word number `word[i]` of `tensor[i]`."""
    word = np.asarray(word, np.int64)
    lane, stripe = word % LANES, word // LANES % (BLOCK_BYTES // STRIPE_BYTES)
    row = layout.first_row[tensor] + word // (BLOCK_BYTES // WORD_BYTES)
    key = value ^ STRIPE_KEYS[stripe, lane]
    np.add.at(sums, (row, lane), _product(key))
    np.add.at(sums, (row, lane ^ 1), value)


def block_sums_reference(bound: BoundSums, sums: npt.NDArray[np.uint64]) -> None:
    buffers = [byte_view(buffer) for buffer in bound.dst]
    for piece in bound.pieces.blocks:
        for chunk in chunks_of(piece, CHUNK_BLOCKS * BLOCK_BYTES):
            words = _rows_of(buffers, chunk).view("<u8").reshape(-1, BLOCK_BYTES // STRIPE_BYTES, LANES)
            first = bound.layout.first_row[chunk["src"]] + chunk["src_offset"] // BLOCK_BYTES
            starts = first + np.arange(chunk["rows"]) * (chunk["src_stride"] // BLOCK_BYTES)
            rows = starts[:, None] + np.arange(chunk["row_bytes"] // BLOCK_BYTES)
            sums[rows.ravel()] = _sums_of(words)
    for piece in _dealt(bound.pieces.words):
        for chunk in chunks_of(piece, CHUNK_WORDS * WORD_BYTES):
            _add_rows(sums, bound.layout, chunk, _rows_of(buffers, chunk).view("<u8"))


def cut_words_reference(bound: BoundSums, sums: npt.NDArray[np.uint64]) -> None:
    buffers = [byte_view(buffer) for buffer in bound.dst]
    for piece in bound.pieces.cut:
        phase = int(piece["src_offset"]) % WORD_BYTES
        whole = np.zeros((piece["rows"], WORD_BYTES), np.uint8)
        whole[:, phase : phase + piece["row_bytes"]] = _rows_of(buffers, piece)
        _add_rows(sums, bound.layout, piece, whole.view("<u8"))


def _dealt(words: Rows) -> Rows:
    """Segments of many rows so that all rows of one begin at the same place in a block."""
    many = words["rows"] * np.gcd(words["src_stride"], BLOCK_BYTES) >= FEW_ROWS * BLOCK_BYTES
    return np.concatenate([words[~many], deal_rows(words[many], BLOCK_BYTES)])


def _add_rows(sums: U64, layout: SumsLayout, piece: Any, words: U64) -> None:
    """`words[r, j]` is word j of row r of the piece."""
    if piece["rows"] >= FEW_ROWS and piece["src_stride"] % BLOCK_BYTES == 0:
        _add_alike(sums, layout, piece, words)
        return
    start = (piece["src_offset"] + np.arange(piece["rows"]) * piece["src_stride"]) // WORD_BYTES
    word = start[:, None] + np.arange(words.shape[1])
    add_words(sums, layout, piece["src"], word.ravel(), words.ravel())


def _add_alike(sums: U64, layout: SumsLayout, piece: Any, words: U64) -> None:
    """`_add_rows` where every row begins at the same place in a block of its own: block by block, no two rows meet."""
    block, first = divmod(int(piece["src_offset"]) // WORD_BYTES, BLOCK_WORDS)
    rows = layout.first_row[piece["src"]] + block + np.arange(piece["rows"]) * (piece["src_stride"] // BLOCK_BYTES)
    for part in np.split(words, range(BLOCK_WORDS - first, words.shape[1], BLOCK_WORDS), axis=1):
        sums[rows] += _part_sums(part, first)
        rows, first = rows + 1, 0


def _part_sums(words: U64, first: int) -> U64:
    """[rows, n] words, the first of each row word number `first` of a block -> [rows, 8] sums."""
    low, high = first // LANES, -(-(first + words.shape[1]) // LANES)
    own = slice(first - low * LANES, first - low * LANES + words.shape[1])
    # a word that equals its key contributes no product; what it adds is taken off again
    missing = STRIPE_KEYS[low:high].ravel().copy()
    filled = np.repeat(missing[None], len(words), axis=0)
    filled[:, own], missing[own] = words, 0
    sums = _sums_of(filled.reshape(len(words), -1, LANES), low)
    return sums - _swapped(missing.reshape(-1, LANES).sum(axis=0, dtype=np.uint64))


def _rows_of(buffers: Sequence[Bytes], piece: Any) -> Bytes:
    """A contiguous copy of what the piece holds, [rows, row_bytes]."""
    columns = (piece[name] for name in ("dst_offset", "dst_stride", "rows", "row_bytes"))
    return np.ascontiguousarray(strided_view(buffers[piece["dst"]], *map(int, columns)))


def _sums_of(words: U64, first_stripe: int = 0) -> U64:
    """[blocks, stripes, 8] words, stripes of a block from `first_stripe` on -> [blocks, 8] sums."""
    sums = np.empty((len(words), LANES), np.uint64)
    stripes, high = np.empty((2, words.shape[1], min(len(words), CACHED_BLOCKS), LANES), np.uint64)
    for start in range(0, len(words), CACHED_BLOCKS):
        part = words[start : start + CACHED_BLOCKS]
        _sum_chunk(part, first_stripe, stripes[:, : len(part)], high[:, : len(part)], sums[start : start + len(part)])
    return sums


def _sum_chunk(words: U64, first_stripe: int, stripes: U64, high: U64, sums: U64) -> None:
    """Stripe before block, so that every operation runs over long rows; into memory that is there already."""
    np.copyto(stripes, words.transpose(1, 0, 2))
    sums[...] = _swapped(np.add.reduce(stripes, axis=0))
    stripes ^= _CHUNK_KEYS[first_stripe : first_stripe + len(stripes), : len(words)]
    np.right_shift(stripes, np.uint64(32), out=high)
    stripes &= np.uint64(0xFFFFFFFF)
    stripes *= high
    sums += np.add.reduce(stripes, axis=0)


def _swapped(lanes: U64) -> U64:
    """Every lane at its neighbour's place."""
    return lanes.reshape(*lanes.shape[:-1], LANES // 2, 2)[..., ::-1].reshape(lanes.shape)


def _product(key: U64) -> U64:
    return (key & np.uint64(0xFFFFFFFF)) * (key >> np.uint64(32))
