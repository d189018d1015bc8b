# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Scatter and gather of words on the device: `changes_reference`, 1,024 positions a program."""

from __future__ import annotations

import triton
import triton.language as tl

from gpusync_kernels.device.launch import launch
from gpusync_kernels.device.tiles import piece_of, place, words_at
from gpusync_kernels.overwrite import BoundChanges
from gpusync_kernels.tiling import TILE_UNITS

WRITE, XOR, KEEP = 0, 1, 2
MODES = {"write": WRITE, "xor": XOR, "keep": KEEP, "restore": WRITE}


def launch_changes(bound: BoundChanges, mode: str) -> None:
    table, restoring, pieces = bound.uploaded
    table = restoring if mode == "restore" else table
    launch(_changes_kernel, len(pieces), table, pieces, MODE=MODES[mode], ELEMENT=bound.element_bytes, TILE=TILE_UNITS)


@triton.jit
def _changes_kernel(table, piece_of_program, MODE: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """dst[place(position)] = word, or ^= word, or old = dst[...], for the positions of one tile that the segment holds.

    `table` as `BoundChanges` lays it out. Segment: bytes 4..7 of the tensor at dst[0..3], ELEMENT = 1, WRITE:
    positions 5 1 7, words 50 10 70, dst before = 0 0 0 0, dst after = 0 50 0 70
    """
    piece = piece_of(table, piece_of_program, 12)
    first = (tl.program_id(0) - tl.load(piece + 10)) * TILE
    number = first + tl.arange(0, TILE)
    inside = number < tl.load(piece + 3)
    positions = tl.load(piece)
    if tl.load(piece + 11) == 8:
        position = tl.load((positions + number * 8).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
    else:
        short = tl.load((positions + number * 4).to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
        position = short.to(tl.int64)
    held, at = place(
        position + tl.load(piece + 4),
        tl.load(piece + 8),
        tl.load(piece + 9),
        tl.load(piece + 7),
        tl.load(piece + 6),
        ELEMENT,
        True,
    )
    held &= inside
    target = words_at(tl.load(piece + 5) + at, ELEMENT)
    if MODE == 2:
        tl.store(words_at(tl.load(piece + 2) + number * ELEMENT, ELEMENT), tl.load(target, mask=held), mask=held)
    else:
        word = tl.load(words_at(tl.load(piece + 1) + number * ELEMENT, ELEMENT), mask=held)
        if MODE == 1:
            word ^= tl.load(target, mask=held)
        tl.store(target, word, mask=held)
