"""XXH3-128 (seed 0) taken apart: its constants, and where the block sums of many tensors lie. Tensors over 240 bytes
only.

Inside a block of 1,024 bytes the hash adds every 8-byte word into eight 64-bit lanes, wrapping; addition commutes, so
the sums of a block can be made by any number of programs or ranks, each for the words it holds (`sums.py`).
Only the step from block to block is serial (`chain.py`):

    sums[b, i] = sum over stripes s of lo32(w ^ k) * hi32(w ^ k) at lane i, plus w at lane i ^ 1
                 w = word 128 b + 8 s + i, k = secret word s + i
    acc = (acc + sums[b]), scrambled, for the (n - 1) // 1024 whole blocks; then + sums of the rest + the last 64 bytes

Specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpusync_kernels.buffers import Ints

Words: TypeAlias = npt.NDArray[np.uint64]

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SHORT_BYTES = 240  # up to here the hash is another one, and the host library's job
BLOCK_BYTES = 1024
STRIPE_BYTES = 64
WORD_BYTES = 8
LANES = 8
PAD_ROWS = 16  # the chain reads this far ahead

PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
AVALANCHE = 0x165667919E3779F9


def secret_words(offset: int, count: int = LANES) -> npt.NDArray[np.uint64]:
    """`count` 64-bit words of the secret from byte `offset` on."""
    return np.frombuffer(SECRET, "<u8", count=count, offset=offset).astype(np.uint64)


START = np.array(
    [PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]], np.uint64
)
STRIPE_KEYS = np.stack([secret_words(8 * stripe) for stripe in range(BLOCK_BYTES // STRIPE_BYTES)])
SCRAMBLE_KEY = secret_words(128)
LAST_STRIPE_KEY = secret_words(121)
LOW_KEY = secret_words(11)
HIGH_KEY = secret_words(117)


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """Where the sums of each tensor lie in one array of uint64 [allocated_rows, 8].

    Tensor t has `blocks[t]` rows of whole blocks from `first_row[t]` on, then one row for the words after them. The
    array ends with rows that nothing is written to.

    sizes 241 and 3000: whole blocks 0 and 2, first rows 0 and 1, 4 rows, 20 allocated; words summed 24 and 368
    """

    nbytes: Ints
    blocks: Ints
    words: Ints
    first_row: Ints
    rows: int

    @classmethod
    def of(cls, nbytes: npt.ArrayLike) -> SumsLayout:
        sizes = np.atleast_1d(np.asarray(nbytes, np.int64))
        if (sizes <= SHORT_BYTES).any():
            short = int(np.argmax(sizes <= SHORT_BYTES))
            raise ValueError(f"tensor {short} has {sizes[short]} bytes; the block form begins at {SHORT_BYTES + 1}")
        blocks = (sizes - 1) // BLOCK_BYTES
        stripes = (sizes - 1) // STRIPE_BYTES
        first_row = np.cumsum(blocks + 1) - (blocks + 1)
        return cls(sizes, blocks, stripes * LANES, first_row, int((blocks + 1).sum()))

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def allocated_rows(self) -> int:
        return self.rows + PAD_ROWS

    @property
    def word_bytes(self) -> Ints:
        """Per tensor, how many of its first bytes the sums cover. The rest is in the last stripe alone."""
        return self.words * WORD_BYTES
