"""Device operations of gpusync: a numpy reference for each, and Triton behind the same functions.

Bind a segment table to buffers once, then run operations on what was bound. Buffers in host memory (numpy arrays,
torch CPU tensors) take the reference, which needs neither torch nor triton; CUDA tensors take Triton.
"""

from gpusync_kernels.adler32 import adler32_checksums, adler32_partials, bind_adler32
from gpusync_kernels.cast import bind_casts, cast_segments, restore_cast
from gpusync_kernels.chain import Links, advance, chain_digests, fingerprints, hex_digests
from gpusync_kernels.copy import copy_segments
from gpusync_kernels.gs01 import Blob, decode_stream, head_bytes, parse_blob, parse_blobs
from gpusync_kernels.host import HostOps, choose_host_ops, host_ops, host_ops_reason, using_host_ops
from gpusync_kernels.moves import bind_moves
from gpusync_kernels.overwrite import (
    Change,
    bind_changes,
    keep_old_words,
    overwrite_words,
    restore_old_words,
    xor_words,
)
from gpusync_kernels.planes import (
    Planes,
    apply_step_planes,
    bind_planes,
    read_full_planes,
    read_step_planes,
    revert_step_planes,
    write_full_planes,
)
from gpusync_kernels.segments import SegmentTable
from gpusync_kernels.sparse import Payload, bind_sparse, sparse_apply, sparse_revert
from gpusync_kernels.sparse_check import sparse_check
from gpusync_kernels.sums import add_cut_words, add_words, bind_sums, block_sums, gather_tails, xor_block_sums
from gpusync_kernels.xor import xor_segments
from gpusync_kernels.xxh3 import SumsLayout

__all__ = [
    "Blob",
    "Change",
    "HostOps",
    "Links",
    "Payload",
    "Planes",
    "SegmentTable",
    "SumsLayout",
    "add_cut_words",
    "add_words",
    "adler32_checksums",
    "adler32_partials",
    "advance",
    "apply_step_planes",
    "bind_adler32",
    "bind_casts",
    "bind_changes",
    "bind_moves",
    "bind_planes",
    "bind_sparse",
    "bind_sums",
    "block_sums",
    "cast_segments",
    "chain_digests",
    "choose_host_ops",
    "copy_segments",
    "decode_stream",
    "fingerprints",
    "gather_tails",
    "head_bytes",
    "hex_digests",
    "host_ops",
    "host_ops_reason",
    "keep_old_words",
    "overwrite_words",
    "parse_blob",
    "parse_blobs",
    "read_full_planes",
    "read_step_planes",
    "restore_cast",
    "restore_old_words",
    "revert_step_planes",
    "sparse_apply",
    "sparse_check",
    "sparse_revert",
    "using_host_ops",
    "write_full_planes",
    "xor_block_sums",
    "xor_segments",
    "xor_words",
]
