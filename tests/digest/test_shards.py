"""What a rank tells of its pieces, and its pieces in layers that hold no byte twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpusync.digest import ShardedTensor, Shards
from gpusync.digest.intervals import singles_of
from gpusync.digest.shards import published


def shards_of(*tensors) -> Shards:
    """Of each tensor a list of byte ranges."""
    items = [
        ShardedTensor(
            name=str(number),
            algorithm="blake3",
            nbytes=10_000,
            pieces=[(first, np.zeros(stop - first, np.uint8)) for first, stop in ranges],
        )
        for number, ranges in enumerate(tensors)
    ]
    return Shards.of(items)


def ranges_of(rows) -> list[tuple[int, int, int]]:
    single = singles_of(rows)
    starts = single["src_offset"]
    return list(zip(single["src"].tolist(), starts.tolist(), (starts + single["row_bytes"]).tolist(), strict=True))


def test_rows_at_equal_steps_are_told_as_one_segment():
    columns = [(row * 100 + 7, row * 100 + 31) for row in range(50)]
    (layer,) = shards_of(columns, columns[:1]).layers()
    told = published(layer)
    assert len(told) == 2
    row = told[0]
    assert [row[name] for name in ("src", "src_offset", "src_stride", "rows", "row_bytes")] == [0, 7, 100, 50, 24]
    assert ranges_of(told) == ranges_of(layer)


ranges = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


@given(first=ranges, second=ranges)
def test_what_is_told_is_what_is_held(first, second):
    for layer in shards_of(first, second).layers():
        assert ranges_of(published(layer)) == ranges_of(layer)


@given(first=ranges, second=ranges)
def test_layers_hold_everything_and_no_byte_twice(first, second):
    layers = shards_of(first, second).layers()
    held = sorted(each for layer in layers for each in ranges_of(layer))
    assert held == sorted([(0, *each) for each in first] + [(1, *each) for each in second])
    deepest = 1
    for tensor, every in enumerate((first, second)):
        times = np.zeros(200, int)
        for start, stop in every:
            times[start:stop] += 1
        deepest = max(deepest, int(times.max()))
        for layer in layers:
            times = np.zeros(200, int)
            for src, start, stop in ranges_of(layer):
                times[start:stop] += src == tensor
            assert times.max() <= 1
    assert len(layers) == deepest


def test_interleaved_columns_are_one_layer():
    odd = [(row * 10, row * 10 + 5) for row in range(20)]
    even = [(row * 10 + 5, row * 10 + 10) for row in range(20)]
    assert len(shards_of(even + odd).layers()) == 1
