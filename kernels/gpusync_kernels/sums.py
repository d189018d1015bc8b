"""Block sums of XXH3 for the bytes that a rank holds: destination = the rank's bytes, source = the tensor they belong
to.

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
from gpusync_kernels.segments import Column, Rows, SegmentTable, chunks_of
from gpusync_kernels.sums_pieces import Pieces, block_launch, cut_into_pieces, demote_unaligned, word_launches
from gpusync_kernels.xor import xor_reference
from gpusync_kernels.xxh3 import BLOCK_BYTES, LANES, STRIPE_BYTES, STRIPE_KEYS, WORD_BYTES, SumsLayout

CHUNK_BLOCKS = 256  # summed at a time by the reference: what stays in a cache
CHUNK_WORDS = 1 << 16

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
    shape = (len(bound.layout), STRIPE_BYTES)
    if bound.device is None:
        tails: Any = np.zeros(shape, np.uint8)
    else:
        from gpusync_kernels.device.launch import zeros

        tails = zeros(shape, bound.device, np.uint8)
    start = bound.layout.nbytes - STRIPE_BYTES
    rows = bound.table.clipped(start, bound.layout.nbytes).swapped().rows.copy()
    rows["dst_offset"] += rows["dst"] * STRIPE_BYTES - start[rows["dst"]]
    rows["dst"] = 0
    copy_segments(Moves(SegmentTable(rows), dst=[tails], src=bound.dst))
    return tails


def add_words(
    sums: npt.NDArray[np.uint64], layout: SumsLayout, tensor: int | Ints, word: Column, value: npt.NDArray[np.uint64]
) -> None:
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
    for piece in bound.pieces.words:
        for chunk in chunks_of(piece, CHUNK_WORDS * WORD_BYTES):
            _add_rows(sums, bound.layout, chunk, _rows_of(buffers, chunk).view("<u8"))


def cut_words_reference(bound: BoundSums, sums: npt.NDArray[np.uint64]) -> None:
    buffers = [byte_view(buffer) for buffer in bound.dst]
    for piece in bound.pieces.cut:
        phase = int(piece["src_offset"]) % WORD_BYTES
        whole = np.zeros((piece["rows"], WORD_BYTES), np.uint8)
        whole[:, phase : phase + piece["row_bytes"]] = _rows_of(buffers, piece)
        _add_rows(sums, bound.layout, piece, whole.view("<u8"))


def _add_rows(sums: npt.NDArray[np.uint64], layout: SumsLayout, piece: Any, words: npt.NDArray[np.uint64]) -> None:
    """`words[r, j]` is word j of row r of the piece."""
    start = (piece["src_offset"] + np.arange(piece["rows"]) * piece["src_stride"]) // WORD_BYTES
    word = start[:, None] + np.arange(words.shape[1])
    add_words(sums, layout, piece["src"], word.ravel(), words.ravel())


def _rows_of(buffers: Sequence[Bytes], piece: Any) -> Bytes:
    """A contiguous copy of what the piece holds, [rows, row_bytes]."""
    columns = (piece[name] for name in ("dst_offset", "dst_stride", "rows", "row_bytes"))
    return np.ascontiguousarray(strided_view(buffers[piece["dst"]], *map(int, columns)))


def _sums_of(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[blocks, 16, 8] words -> [blocks, 8] sums."""
    products = _product(words ^ STRIPE_KEYS).sum(axis=1, dtype=np.uint64)
    added = words.sum(axis=1, dtype=np.uint64).reshape(-1, LANES // 2, 2)[:, :, ::-1].reshape(-1, LANES)
    sums: npt.NDArray[np.uint64] = products + added
    return sums


def _product(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (key & np.uint64(0xFFFFFFFF)) * (key >> np.uint64(32))
