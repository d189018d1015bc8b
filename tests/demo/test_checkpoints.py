from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from gpusync.demo import checkpoints
from gpusync.demo.checkpoints import check_equal, time_full_reload, write_checkpoint
from gpusync.errors import DigestMismatchError
from gpusync.stream.writer import ShardEntry


def _entries(changed_byte: int | None = None, shape: tuple[int, ...] = (3, 2)) -> list[ShardEntry]:
    data = np.arange(12, dtype=np.uint8)
    if changed_byte is not None:
        data[changed_byte] ^= 1
    return [
        ShardEntry(name="a", dtype="BF16", shape=shape, data=data),
        ShardEntry(name="b", dtype="I64", shape=(), data=b"\1" * 8),
    ]


def test_a_written_checkpoint_is_cut_into_shards_that_safetensors_reads(tmp_path, monkeypatch):
    # One tensor fits, two do not: each gets a shard of its own.
    monkeypatch.setattr(checkpoints, "_SHARD_BYTES", 16)
    assert write_checkpoint(tmp_path / "m", _entries()) == 20
    first, second = sorted((tmp_path / "m").glob("*.safetensors"))
    assert load_file(first)["a"].view(-1).untyped_storage().tolist() == list(range(12))
    assert load_file(second)["b"].item() == 0x0101010101010101
    assert time_full_reload(tmp_path / "m") > 0
    check_equal(tmp_path / "m", tmp_path / "m")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (_entries(changed_byte=7), "at byte 7"),
        (_entries(shape=(2, 3)), "another form"),
        (_entries()[:1], "other tensors"),
    ],
)
def test_any_difference_is_an_error_that_says_where(tmp_path, other, told):
    write_checkpoint(tmp_path / "m", _entries())
    write_checkpoint(tmp_path / "other", other)
    with pytest.raises(DigestMismatchError, match=told):
        check_equal(tmp_path / "other", tmp_path / "m")


def test_a_difference_beyond_the_first_window_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_WINDOW_BYTES", 5)
    write_checkpoint(tmp_path / "m", _entries())
    write_checkpoint(tmp_path / "other", _entries(changed_byte=11))
    with pytest.raises(DigestMismatchError, match="at byte 11"):
        check_equal(tmp_path / "other", tmp_path / "m")
