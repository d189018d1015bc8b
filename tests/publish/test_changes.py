"""A change that was found makes the old bytes into the new ones, whatever its size, and counts single bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusync.codec import MemoryPayload
from gpusync.publish.changes import find_change

# Nothing, less than a word, words and a tail, one window of the comparison (1 MiB) and a byte to either side of it.
SIZES = [0, 1, 7, 8, 9, 63, 64, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
@pytest.mark.parametrize("stored", [False, True])
def test_it_applies_to_the_old_state(nbytes, share, stored):
    rng = np.random.default_rng(nbytes)
    old = rng.integers(0, 256, nbytes, dtype=np.uint8)
    new = old.copy()
    new[rng.random(nbytes) < share] ^= 255
    kept_new = new.copy()
    change = (
        find_change(MemoryPayload(old), MemoryPayload(new), keep=True) if stored else find_change(old, new, keep=True)
    )
    assert change.changed_bytes == np.count_nonzero(old != kept_new)
    # What is kept refers to neither: the trainer goes on changing its tensor.
    new[:] = 0
    if change.changed_bytes:
        assert np.array_equal(change.apply_to(old.copy()), kept_new)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.dictionaries(st.integers(0, 199), st.integers(1, 255), max_size=30))
def test_any_bytes_may_change(data, changes):
    old = np.frombuffer(data, np.uint8).copy()
    new = old.copy()
    for at, value in changes.items():
        if at < new.size:
            new[at] ^= value
    change = find_change(old, new, keep=True)
    assert change.changed_bytes == np.count_nonzero(old != new)
    if change.changed_bytes:
        assert np.array_equal(change.apply_to(old), new)


@pytest.mark.parametrize(("share", "most"), [(0.002, 0.3), (0.9, 1.0)])
def test_what_is_kept_is_never_larger_than_the_tensor(share, most):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    new = old.copy()
    new[rng.random(old.size) < share] ^= 1
    change = find_change(old, new, keep=True)
    kept = sum(part.nbytes for part in (change.positions, change.words, change.tail, change.whole) if part is not None)
    assert kept <= most * old.size


def test_nothing_is_kept_unasked():
    change = find_change(np.zeros(16, np.uint8), np.ones(16, np.uint8), keep=False)
    assert (change.changed_bytes, change.whole, change.positions) == (16, None, None)
    with pytest.raises(ValueError, match="not kept"):
        change.apply_to(np.zeros(16, np.uint8))
