"""Copy bytes over a segment table: live slices to scratch and back, gathers of tails and cut words. Bit for bit."""

from __future__ import annotations

from gpusync_kernels.moves import Moves


def copy_segments(moves: Moves) -> None:
    """Destination bytes become the source bytes. Source and destination must not overlap."""
    if moves.device is None:
        copy_reference(moves)
    else:
        from gpusync_kernels.device.copy import launch_copy

        launch_copy(moves)


def copy_reference(moves: Moves) -> None:
    for dst, src in moves.views():
        dst[...] = src
