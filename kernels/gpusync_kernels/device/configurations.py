"""Every kernel with every set of constants that a launcher can choose: what is compiled at attach, and what tests
compile.

Pointers are to tables that torch allocated, so they are multiples of 16; sizes are in the tables. Hence one entry
here is one binary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpusync_kernels.adler32 import TILE_BYTES
from gpusync_kernels.device.adler32 import _adler32_kernel
from gpusync_kernels.device.cast import _cast_kernel
from gpusync_kernels.device.chain import _chain_kernel
from gpusync_kernels.device.copy import _copy_kernel
from gpusync_kernels.device.gs01 import NUM_WARPS
from gpusync_kernels.device.overwrite import _changes_kernel
from gpusync_kernels.device.planes import _read_planes_kernel, _write_planes_kernel
from gpusync_kernels.device.sparse import _sparse_kernel
from gpusync_kernels.device.sparse_check import _sparse_check_kernel
from gpusync_kernels.device.sums import _block_sums_kernel, _word_sums_kernel
from gpusync_kernels.device.xor import _xor_kernel
from gpusync_kernels.planes import tile_elements
from gpusync_kernels.sums_pieces import ITEMS
from gpusync_kernels.tiling import TILE_UNITS, UNITS

WIDTHS = (1, 2, 4, 8)
TABLE = {"table": "*i64", "piece_of_program": "*i32"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """`pointers`: argument name -> Triton type, in the kernel's order; `constants`: its compile-time arguments."""

    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, int] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        constants = "-".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__.strip('_').removesuffix('_kernel')}-{constants}".rstrip("-")


def configurations() -> Iterator[Configuration]:
    """In the order of `kernels/README.md`."""
    sums = {**TABLE, "keys": "*i64", "sums": "*i64"}
    for kernel in (_copy_kernel, _xor_kernel):
        for unit in UNITS:
            yield Configuration(kernel, TABLE, {"UNIT": unit, "TILE": TILE_UNITS})
    for mode in (0, 1, 2):
        for width in WIDTHS:
            yield Configuration(_changes_kernel, TABLE, {"MODE": mode, "ELEMENT": width, "TILE": TILE_UNITS})
    for width in WIDTHS:
        yield Configuration(_sparse_kernel, TABLE, {"ELEMENT": width}, NUM_WARPS)
    faults = {**TABLE, "bitmaps": "*i32", "faults": "*i32"}
    yield Configuration(_sparse_check_kernel, faults, num_warps=NUM_WARPS)
    for kernel in (_write_planes_kernel, _read_planes_kernel):
        for width in WIDTHS:
            for unit in (16, 1):
                constants = {"ELEMENT": width, "UNIT": unit, "TILE": tile_elements(width, unit) // unit}
                yield Configuration(kernel, {**TABLE, "mode": "*i64"}, constants)
    for flag in (False, True):
        yield Configuration(_block_sums_kernel, sums, {"XOR": flag, "BLOCKS": ITEMS})
    for flag in (False, True):
        yield Configuration(_word_sums_kernel, sums, {"BY_BYTES": flag, "BLOCKS": ITEMS})
    chain = {"table": "*i64", "start": "*i64", "sums": "*i64", "tails": "*u8", "keys": "*i64", "out": "*i64"}
    yield Configuration(_chain_kernel, {**chain, "tails": "*i64"}, {"FINISH": False}, num_warps=1)
    yield Configuration(_chain_kernel, chain, {"FINISH": True}, num_warps=1)
    for align in (16, 1):
        yield Configuration(_adler32_kernel, {**TABLE, "sums": "*i64"}, {"ALIGN": align, "TILE": TILE_BYTES})
    for source, target in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4)):
        constants = {"SOURCE": source, "TARGET": target, "TILE": TILE_UNITS}
        yield Configuration(_cast_kernel, TABLE, constants)


def compile_all(device: torch.device) -> int:
    """Compiles every configuration for `device` (seconds each, cached on disk by Triton), so that no launch has to
    wait.

    Returns how many there are.
    """
    dtypes = {"*i64": torch.int64, "*i32": torch.int32, "*u8": torch.uint8}
    count = 0
    with torch.cuda.device(device):
        for each in configurations():
            tensors = [torch.zeros(16, dtype=dtypes[kind], device=device) for kind in each.pointers.values()]
            each.kernel.warmup(*tensors, grid=(1,), num_warps=each.num_warps, **each.constants)
            count += 1
    return count
