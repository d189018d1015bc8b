"""Redo spools: what is written comes back, replaying is idempotent, damage is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.codec.compact import changed_positions
from gpusync.errors import JournalError
from gpusync.mirror.redo import CHECKSUM, HEADER, RedoWriter, read_records
from gpusync_kernels import using_host_ops
from support.loops import loops_of


def windows(seed: int, elements: int, width: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width, dtype=np.uint8)
    new = old.copy()
    at = rng.random(elements) < share
    new.reshape(-1, width)[at, rng.integers(0, width)] ^= 0x81
    return old, new


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@given(
    seed=st.integers(0, 2**32),
    elements=st.sampled_from([0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000]),
    width=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_changed_positions_are_those_of_a_plain_comparison(
    loops: Literal["numpy", "numba"], seed: int, elements: int, width: int, share: float
) -> None:
    old, new = windows(seed, elements, width, share)
    plain = np.flatnonzero((old != new).reshape(-1, width).any(axis=1))
    with using_host_ops(loops_of(loops)):
        found = changed_positions(old, new, element_bytes=width)
        without_old = changed_positions(None, old ^ new, element_bytes=width)
    assert found.dtype == without_old.dtype == np.uint32
    assert found.tolist() == without_old.tolist() == plain.tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.3, 1.0])
def test_records_bring_old_new_and_torn_windows_to_the_new_state(tmp_path: Path, width: int, share: float) -> None:
    old, new = windows(1, 5000, width, share)
    writer = RedoWriter(tmp_path / "spool")
    writer.add(file=3, offset=1234, old=old, new=new, element_bytes=width)
    nbytes = writer.finish()
    records = list(read_records(tmp_path / "spool", nbytes=nbytes))
    assert len(records) == (share > 0)
    assert writer.elements_changed == changed_positions(old, new, element_bytes=width).size
    for record in records:
        assert (record.file, record.offset, record.span) == (3, 1234, new.size)
        for start in (old, new, np.concatenate([new[:1000], old[1000:]])):
            window = start.copy()
            record.apply(window)
            assert window.tobytes() == new.tobytes()


def test_a_dense_window_is_stored_raw_and_a_sparse_one_is_not(tmp_path: Path) -> None:
    for share, most in ((0.01, 0.05), (1.0, 1.01)):
        old, new = windows(2, 100_000, 2, share)
        writer = RedoWriter(tmp_path / f"{share}")
        writer.add(file=0, offset=0, old=old, new=new, element_bytes=2)
        assert writer.finish() <= most * new.size


@pytest.mark.parametrize("at", [0, 5, HEADER.size, HEADER.size + CHECKSUM.size, -1])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, at: int) -> None:
    old, new = windows(3, 1000, 2, 0.1)
    writer = RedoWriter(tmp_path / "spool")
    writer.add(file=0, offset=0, old=old, new=new, element_bytes=2)
    nbytes = writer.finish()
    raw = bytearray((tmp_path / "spool").read_bytes())
    raw[at] ^= 4
    (tmp_path / "spool").write_bytes(raw)
    with pytest.raises(JournalError) as caught:
        list(read_records(tmp_path / "spool", nbytes=nbytes))
    assert caught.value.path == str(tmp_path / "spool")


@pytest.mark.parametrize("cut", [1, 40, 1000])
def test_a_cut_spool_is_noticed(tmp_path: Path, cut: int) -> None:
    old, new = windows(3, 1000, 2, 0.3)
    writer = RedoWriter(tmp_path / "spool")
    writer.add(file=0, offset=0, old=old, new=new, element_bytes=2)
    nbytes = writer.finish()
    with (tmp_path / "spool").open("r+b") as file:
        file.truncate(nbytes - cut)
    with pytest.raises(JournalError, match="wrong length") as caught:
        list(read_records(tmp_path / "spool", nbytes=nbytes))
    assert (caught.value.expected, caught.value.found) == (nbytes, nbytes - cut)
