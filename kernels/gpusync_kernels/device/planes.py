# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: RET505  (in a kernel, branches on constants must be written out: what follows a return is still compiled)
"""Byte planes on the device: `write_planes_reference` and `read_planes_reference`, up to 2,048 elements a program."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from gpusync_kernels.device.launch import launch, upload
from gpusync_kernels.device.tiles import aligned_words_at, piece_of, rows_of
from gpusync_kernels.planes import BoundPlanes, tile_elements

FULL, APPLY, REVERT = 0, 1, -1
MODES = {"full": FULL, "apply": APPLY, "revert": REVERT, "steps": APPLY}


def launch_write_planes(bound: BoundPlanes, mode: str) -> None:
    _launch(_write_planes_kernel, bound, mode)


def launch_read_planes(bound: BoundPlanes, mode: str) -> None:
    _launch(_read_planes_kernel, bound, mode)


def _launch(kernel: object, bound: BoundPlanes, mode: str) -> None:
    for width, unit, table, pieces in bound.uploaded:
        sign = _mode(MODES[mode], table.device)
        tile = tile_elements(width, unit) // unit
        launch(kernel, len(pieces), table, pieces, sign, ELEMENT=width, UNIT=unit, TILE=tile)


@cache
def _mode(mode: int, device: torch.device) -> torch.Tensor:
    return upload(np.array([mode], np.int64), device)


@triton.jit
def _write_planes_kernel(table, piece_of_program, mode, ELEMENT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Words from planes, or planes' steps added to words (mode 1) or taken off (mode -1); `table`:
    `BoundPlanes._launch`.

    ELEMENT = 2, order 0, mode 1: planes 02 03 00 00 are steps 1 -2; words before = 5 5, after = 6 3
    """
    piece = piece_of(table, piece_of_program, 11)
    row, unit, inside = _units(piece, UNIT, TILE)
    planes, target = _pointers(piece, 0, row, unit, ELEMENT, UNIT)
    sign = tl.load(mode)
    coded = _join_planes(planes, tl.multiple_of(tl.load(piece + 4), UNIT), inside, ELEMENT)
    if sign == 0:
        word = coded
    else:
        old = _to_order(tl.load(target, mask=inside, other=0), tl.load(piece + 10), ELEMENT)
        step = _logical_shift(coded, ELEMENT) ^ (0 - (coded & 1))
        word = _to_order(_wrap(old + step * sign.to(coded.dtype), ELEMENT), tl.load(piece + 10), ELEMENT)
    tl.store(target, word.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _read_planes_kernel(table, piece_of_program, mode, ELEMENT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Planes from words, or from the steps between old words and words (mode 1); `table`: `BoundPlanes._launch`.

    ELEMENT = 2, order 0, mode 1: old words 5 5, words 6 3: steps 1 -2, planes 02 03 00 00
    """
    piece = piece_of(table, piece_of_program, 11)
    row, unit, inside = _units(piece, UNIT, TILE)
    planes, source = _pointers(piece, 0, row, unit, ELEMENT, UNIT)
    word = _widen(tl.load(source, mask=inside, other=0), ELEMENT)
    if tl.load(mode) != 0:
        _, before = _pointers(piece, 2, row, unit, ELEMENT, UNIT)
        order = tl.load(piece + 10)
        old = _to_order(tl.load(before, mask=inside, other=0), order, ELEMENT)
        step = _wrap(_to_order(word, order, ELEMENT) - old, ELEMENT)
        word = (step << 1) ^ (step >> (8 * ELEMENT - 1))
    size = tl.multiple_of(tl.load(piece + 4), UNIT)
    for plane in tl.static_range(ELEMENT):
        tl.store(planes + size * plane, (word >> (8 * plane)).to(tl.int8), mask=inside)


@triton.jit
def _units(piece, UNIT: tl.constexpr, TILE: tl.constexpr):
    first = (tl.program_id(0) - tl.load(piece + 9)) * TILE
    row, unit = rows_of(first, tl.load(piece + 7), TILE)
    return row, unit * UNIT, (first + tl.arange(0, TILE) < tl.load(piece + 8))[:, None]


@triton.jit
def _pointers(piece, COLUMN: tl.constexpr, row, element, ELEMENT: tl.constexpr, UNIT: tl.constexpr):
    """`(first plane's bytes, words)` of each unit, [TILE, UNIT]. COLUMN 0: the destination's words, 2: the old ones."""
    within = tl.arange(0, UNIT)[None, :]
    byte = tl.load(piece + 3) + tl.load(piece + 5) + row * tl.load(piece + 6) + element
    word = tl.load(piece + COLUMN) + row * tl.load(piece + 1) + element * ELEMENT
    planes = aligned_words_at(byte, 1, UNIT)[:, None]
    return planes + within, aligned_words_at(word, ELEMENT, UNIT)[:, None] + within


@triton.jit
def _join_planes(planes, size, inside, ELEMENT: tl.constexpr):
    """Words, as wide as `_widen` makes them, unsigned in ELEMENT bytes."""
    word = _byte(planes, inside, ELEMENT)
    for plane in tl.static_range(1, ELEMENT):
        word |= _byte(planes + size * plane, inside, ELEMENT) << (8 * plane)
    return word


@triton.jit
def _byte(pointers, inside, ELEMENT: tl.constexpr):
    value = tl.load(pointers, mask=inside, other=0)
    if ELEMENT == 8:
        return value.to(tl.int64) & 0xFF
    else:
        return value.to(tl.int32) & 0xFF


@triton.jit
def _widen(word, ELEMENT: tl.constexpr):
    """A signed word in the width that steps are calculated in."""
    if ELEMENT == 8:
        return word.to(tl.int64)
    else:
        return word.to(tl.int32)


@triton.jit
def _wrap(value, ELEMENT: tl.constexpr):
    """A result cut to ELEMENT bytes, with its sign."""
    if ELEMENT == 1:
        return value.to(tl.int8).to(tl.int32)
    elif ELEMENT == 2:
        return value.to(tl.int16).to(tl.int32)
    else:
        return value


@triton.jit
def _to_order(word, order, ELEMENT: tl.constexpr):
    """`word_order.to_order`, and its inverse: it is its own."""
    signed = _widen(word, ELEMENT)
    limit = (order * ((1 << (8 * ELEMENT - 1)) - 1)).to(signed.dtype)
    return signed ^ ((signed >> (8 * ELEMENT - 1)) & limit)


@triton.jit
def _logical_shift(word, ELEMENT: tl.constexpr):
    """word >> 1 with a zero from above."""
    if ELEMENT == 8:
        return (word.to(tl.uint64, bitcast=True) >> 1).to(tl.int64, bitcast=True)
    else:
        return (word.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
