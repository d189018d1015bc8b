"""Exclusive-or of a payload into its destinations, in place over a segment table."""

from __future__ import annotations

import numpy as np

from gpusync_kernels.moves import Moves


def xor_segments(moves: Moves) -> None:
    """Destination bytes become destination ^ source. Not idempotent: applying twice restores the old bytes."""
    if moves.device is None:
        xor_reference(moves)
    else:
        from gpusync_kernels.device.xor import launch_xor

        launch_xor(moves)


def xor_reference(moves: Moves) -> None:
    for dst, src in moves.views():
        np.bitwise_xor(dst, src, out=dst)
