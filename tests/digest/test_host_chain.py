"""Chains on the host, advanced together or one by one, against the reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.digest.host_chain import FEW_CHAINS, SHORT_CHAIN, advance_on_host
from gpusync_kernels.chain import Links, advance_reference
from gpusync_kernels.xxh3 import BLOCK_BYTES, SumsLayout

LARGEST = 2**64 - 1


def check(blocks, first, stop, sums, lanes):
    layout = SumsLayout.of(np.array(blocks) * BLOCK_BYTES + 300)
    links = Links(lanes, np.array(first), np.array(stop))
    found = advance_on_host(layout, sums[: layout.allocated_rows], links)
    assert (found == advance_reference(layout, sums, links)).all()
    assert (links.lanes == lanes).all()


@pytest.mark.parametrize("content", ["random", "largest"])
@pytest.mark.parametrize("chains", [0, 1, FEW_CHAINS, FEW_CHAINS + 1])
def test_around_the_number_that_are_advanced_one_by_one(chains, content):
    """The largest sums and lanes: what is carried from one lane must not reach the next."""
    blocks = [SHORT_CHAIN * 70 + 3 * number for number in range(chains)]
    rng = np.random.default_rng(chains)
    size = (sum(blocks) + chains + 16, 8)
    sums = rng.integers(0, LARGEST, size, np.uint64, endpoint=True)
    if content == "largest":
        sums[:] = LARGEST
    lanes = np.full((chains, 8), LARGEST, np.uint64)
    check(blocks, [0] * chains, blocks, sums, lanes)


@settings(max_examples=50)
@given(
    parts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), min_size=1, max_size=14),
    seed=st.integers(0, 9),
)
def test_any_part_of_any_chain(parts, seed):
    rng = np.random.default_rng(seed)
    sums = rng.integers(0, LARGEST, (len(parts) * 61 + 16, 8), np.uint64, endpoint=True)
    lanes = rng.integers(0, LARGEST, (len(parts), 8), np.uint64, endpoint=True)
    check([60] * len(parts), [first for first, _ in parts], [stop for _, stop in parts], sums, lanes)
