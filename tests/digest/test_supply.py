"""Bytes that are made when they are asked for: how they are asked for, and digests through windows of any size."""

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owners import KINDS, pieces_of, random_bytes, share_out
from supplies import Scratch, supplied

from gpusync.digest import (
    ALGORITHMS,
    Partial,
    ReplicaMismatchError,
    ShardedTensor,
    Shards,
    combine,
    digest_of,
    sharded_digests,
)
from gpusync.digest.exchange import Seat, run_together
from gpusync.digest.intervals import singles_of
from gpusync.digest.program import digest_program
from gpusync.digest.supply import SMALLEST_WINDOW_BYTES, cut_windows, held_before
from gpusync.errors import GpusyncError, LayoutError, PeerFailedError
from gpusync_kernels.segments import SegmentTable

KIB = 1024
# Around the short hash and one block; whole blocks; a last stripe that begins in the block before (+ 1 and + 63).
SIZES = (0, 1, 17, 240, 241, 1023, 1024, 1025, 2 * KIB + 63, 4 * KIB, 5003)
# The smallest; one that no block or row is a multiple of; one that holds several blocks.
WINDOWS = (SMALLEST_WINDOW_BYTES, 1500, 4096)
TINY_BUDGET = 300


def made(algorithm, data, ranges, window_bytes, **options):
    tensor = ShardedTensor(name="w", algorithm=algorithm, nbytes=data.size, pieces=pieces_of(data, ranges))
    return Partial(supplied([tensor], window_bytes, **options))


def ranges_of(rows):
    single = singles_of(rows)
    starts = single["src_offset"]
    return list(zip(single["src"].tolist(), starts.tolist(), (starts + single["row_bytes"]).tolist(), strict=True))


def bytes_of(rows):
    return sorted((source, byte) for source, start, stop in ranges_of(rows) for byte in range(start, stop))


def test_what_is_held_before_a_position():
    rows = SegmentTable.strided(
        dst=0, dst_offset=0, dst_stride=4, src=0, src_offset=10, src_stride=10, rows=3, row_bytes=4
    ).rows
    assert [held_before(rows, position) for position in (0, 10, 12, 14, 20, 22, 34, 99)] == [0, 0, 2, 4, 4, 6, 12, 12]


@settings(max_examples=50)
@given(data=st.data())
def test_windows_are_ascending_whole_and_no_larger_than_allowed(data):
    parts = []
    for source in range(data.draw(st.integers(1, 4), "sources")):
        stride = data.draw(st.integers(1, 900), "stride")
        count = data.draw(st.integers(1, 12), "rows")
        left = data.draw(st.integers(0, stride - 1), "left")
        for begin, end in ((0, left // 2), (left, stride)):
            if begin < end:
                parts.append(
                    SegmentTable.strided(
                        dst=0,
                        dst_offset=0,
                        dst_stride=stride,
                        src=source,
                        src_offset=begin,
                        src_stride=stride,
                        rows=count,
                        row_bytes=end - begin,
                    ).rows
                )
    rows = np.concatenate(parts)
    limit = data.draw(st.integers(KIB, 4 * KIB), "window")
    windows = list(cut_windows(rows, limit))
    held = [bytes_of(window) for window in windows]
    # all bytes once, and in order from window to window
    assert [byte for window in held for byte in window] == bytes_of(rows)
    assert max(map(len, held)) <= limit
    for before, after in itertools.pairwise(held):
        (last_source, last), (source, byte) = before[-1], after[0]
        assert last_source < source or last // KIB < byte // KIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owners", [1, 2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_library_for_every_size_ownership_and_window(algorithm, owners, kind):
    for size in SIZES:
        data = random_bytes(size, size)
        shares = share_out(kind, size, owners, seed=owners)
        for window in WINDOWS:
            parts = [made(algorithm, data, ranges, window) for ranges in shares]
            assert combine(algorithm, size, parts) == digest_of(algorithm, data), (size, window)
            for part in parts:
                assert part.shards.supply.largest <= window
                if kind != "overlapping":
                    assert part.shards.supply.times[0].max(initial=0) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batches_and_windows_of_one_block(algorithm, kind):
    for size in (4 * KIB + 1, 4 * KIB + 63, 9001):
        data = random_bytes(1, size)
        parts = [made(algorithm, data, ranges, KIB) for ranges in share_out(kind, size, 3, seed=7)]
        assert combine(algorithm, size, parts, budget_bytes=TINY_BUDGET) == digest_of(algorithm, data)
        if kind != "overlapping":
            assert max(part.shards.supply.times[0].max() for part in parts) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_may_have_windows_of_their_own_or_buffers(algorithm):
    data = random_bytes(2, 100_001)
    shares = share_out("random", data.size, 3, seed=4)
    parts = [made(algorithm, data, ranges, window) for ranges, window in zip(shares, (KIB, 7000, 1 << 20), strict=True)]
    parts[2] = Partial(dataclasses.replace(parts[2].shards, supply=None, buffers=parts[2].shards.supply.buffers))
    assert combine(algorithm, data.size, parts) == digest_of(algorithm, data)


def slices(number, data, width, window_bytes, algorithm="xxh3-128"):
    """A rank's half of the columns as one segment, as a tensor-parallel rank has it."""
    half = np.ascontiguousarray(data.reshape(-1, width)[:, number * width // 2 : (number + 1) * width // 2])
    table = SegmentTable.strided(
        dst=0,
        dst_offset=0,
        dst_stride=width // 2,
        src=0,
        src_offset=number * width // 2,
        src_stride=width,
        rows=len(half),
        row_bytes=width // 2,
    )
    shards = Shards(
        names=("w",), algorithms=(algorithm,), nbytes=np.array([data.size]), table=table, buffers=(half.reshape(-1),)
    )
    return Partial(supplied(shards, window_bytes))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("width", [6, 700, 4096])
def test_columns_go_through_a_scratch_once_and_in_order(algorithm, width):
    data = random_bytes(3, width * (300_000 // width))
    parts = [slices(number, data, width, 10_000, algorithm) for number in range(2)]
    assert combine(algorithm, data.size, parts, budget_bytes=1 << 20) == digest_of(algorithm, data)
    for number, part in enumerate(parts):
        supply = part.shards.supply
        assert supply.calls >= data.size // 2 // 10_000
        assert supply.asked == sorted(supply.asked)
        times = supply.times[0].reshape(-1, width)
        mine = slice(number * width // 2, (number + 1) * width // 2)
        assert (times[:, mine] == 1).all()
        assert times.sum() == data.size // 2


def test_many_tensors_on_one_rank_are_asked_for_together():
    sizes = [*SIZES, 30_000, *[100] * 50]
    tensors = [
        ShardedTensor(
            name=str(number), algorithm=ALGORITHMS[number % 3], nbytes=size, pieces=[(0, random_bytes(number, size))]
        )
        for number, size in enumerate(sizes)
    ]
    shards = supplied(tensors, 8000)
    wanted = [digest_of(tensor.algorithm, tensor.pieces[0][1]) for tensor in tensors]
    assert list(sharded_digests(shards, None).digests) == wanted
    assert all((times == 1).all() for times in shards.supply.times)
    assert shards.supply.largest <= 8000
    # 53 KB through windows of 8,000 bytes; a window may end early where a tensor does not fit into the rest
    assert shards.supply.calls <= 12


def test_a_rank_that_holds_nothing_is_asked_for_nothing():
    data = random_bytes(4, 5000)
    for algorithm in ALGORITHMS:
        parts = [made(algorithm, data, ranges, KIB) for ranges in ([], [(0, 5000)], [])]
        assert combine(algorithm, 5000, parts) == digest_of(algorithm, data)
        assert [part.shards.supply.calls for part in parts] == [0, parts[1].shards.supply.calls, 0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("window", [KIB, 3000])
def test_copies_are_compared_through_windows(algorithm, window):
    """Ranks 2k and 2k + 1 have the same rows; every byte is supplied once to be fingerprinted, and once more on the
    rank whose bytes make the digest."""
    size = 16_000
    data, shares = (
        random_bytes(5, size),
        [[(size // 2 * (rank // 2), size // 2 * (rank // 2 + 1))] for rank in range(4)],
    )
    parts = [made(algorithm, data, ranges, window) for ranges in shares]
    assert combine(algorithm, size, parts) == digest_of(algorithm, data)
    assert [part.shards.supply.times[0].max() for part in parts] == [2, 1, 2, 1]
    other = data.copy()
    other[12_345] ^= 0x10
    parts[3] = made(algorithm, other, shares[3], window)
    with pytest.raises(ReplicaMismatchError) as caught:
        combine(algorithm, size, parts)
    error = caught.value
    assert (error.tensor, error.rank, error.like_rank, error.first_byte) == ("w", 3, 2, 12_345)
    assert (error.expected, error.found) == (f"0x{data[12_345]:02x}", f"0x{other[12_345]:02x}")
    assert max(part.shards.supply.largest for part in parts) <= window


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_copies_are_supplied_once_until_one_differs(algorithm):
    data, whole = random_bytes(6, 9000), [(0, 9000)]
    parts = [made(algorithm, data, whole, 2000) for _ in range(3)]
    assert combine(algorithm, 9000, parts) == digest_of(algorithm, data)
    assert all((part.shards.supply.times[0] == 1).all() for part in parts)
    other = data.copy()
    other[8999] ^= 1
    with pytest.raises(ReplicaMismatchError) as caught:
        combine(algorithm, 9000, [*parts[:2], made(algorithm, other, whole, 2000)])
    assert (caught.value.rank, caught.value.like_rank, caught.value.first_byte) == (2, 0, 8999)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_element_is_cut_however_often_it_is_asked_for(algorithm, kind):
    """Elements of 8 bytes, whole ones in every piece; small batches, then the search for a byte that differs."""
    data = random_bytes(12, 8 * 1501)
    shares = [[(8 * first, 8 * stop) for first, stop in ranges] for ranges in share_out(kind, 1501, 2, seed=6)]
    other = data.copy()
    holder = 0 if shares[0] else 1
    wrong = shares[holder][0][0] + 8 * 3
    other[wrong] ^= 2
    for second, found in ((data, None), (other, wrong)):
        contents = zip((data, data, second), (*shares, shares[holder]), strict=True)
        parts = [made(algorithm, content, ranges, 1100) for content, ranges in contents]
        if found is None:
            assert combine(algorithm, data.size, parts, budget_bytes=5000) == digest_of(algorithm, data)
        else:
            with pytest.raises(ReplicaMismatchError) as caught:
                combine(algorithm, data.size, parts, budget_bytes=5000)
            assert caught.value.first_byte == found
        assert all(part.shards.supply.unit % 8 == 0 for part in parts)


def test_a_byte_that_a_rank_has_twice_is_compared():
    data = random_bytes(7, 6000)
    torn = data.copy()
    torn[4321] ^= 4
    tensor = ShardedTensor(name="tied", algorithm="xxh3-128", nbytes=6000, pieces=[(0, data), (3000, torn[3000:])])
    with pytest.raises(ReplicaMismatchError, match="rank 0 has two copies") as caught:
        sharded_digests(supplied([tensor], KIB), None)
    assert caught.value.first_byte == 4321


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["rows", "columns", "whole", "one owner"])
def test_a_supply_that_fails_is_told_to_the_others_at_any_call(algorithm, kind):
    """Rank 1 fails at its first call, its second, ..., until it has no more of them."""
    size, ranks = 6000, 3
    data = random_bytes(8, size)
    shares = [[(0, size)]] * ranks if kind == "whole" else share_out(kind, size, ranks, seed=3)
    failing = 2 if kind == "one owner" else 1
    calls = 0
    while True:
        outcomes = _outcomes(
            [made(algorithm, data, r, KIB, fail_at=None if n != failing else calls) for n, r in enumerate(shares)]
        )
        if isinstance(outcomes[failing], list):
            break
        assert str(outcomes[failing]) == "the supply ran dry"
        for rank in {0, 1, 2} - {failing}:
            assert isinstance(outcomes[rank], PeerFailedError)
            assert outcomes[rank].ranks == {failing: "RuntimeError: the supply ran dry"}
        calls += 1
    assert outcomes == [[digest_of(algorithm, data)]] * ranks
    assert calls > 1


def test_a_supply_that_fails_while_a_difference_is_looked_for_is_told():
    data = random_bytes(9, 20_000)
    other = data.copy()
    other[15_000] ^= 1
    copies, whole = (data, other), [(0, data.size)]
    calls = data.size // KIB + 1  # one pass over everything, then the search
    outcomes = _outcomes(
        [made("xxh3-128", each, whole, KIB, fail_at=calls if n else None) for n, each in enumerate(copies)]
    )
    assert str(outcomes[1]) == "the supply ran dry"
    assert isinstance(outcomes[0], ReplicaMismatchError)


def _outcomes(parts):
    """What each rank's program returned or raised."""

    def guarded(rank, part):
        try:
            return (yield from digest_program(part.shards.itself, Seat(rank=rank, ranks=len(parts), budget_bytes=2000)))
        except (GpusyncError, RuntimeError) as error:
            return error

    return run_together([guarded(rank, part) for rank, part in enumerate(parts)])


def test_what_is_no_supply_is_refused():
    data = random_bytes(10, 5000)
    tensor = ShardedTensor(name="w", algorithm="xxh3-128", nbytes=5000, pieces=[(0, data)])
    shards = supplied([tensor], KIB)
    with pytest.raises(LayoutError, match="buffers and a supply"):
        dataclasses.replace(shards, buffers=(data,))
    with pytest.raises(LayoutError, match="too small a window") as caught:
        sharded_digests(supplied([tensor], KIB - 1), None)
    assert (caught.value.expected, caught.value.found) == ("1024 bytes", 1023)

    class Shorter(Scratch):
        def take(self, rows):
            rows, buffers = super().take(rows)
            return rows[1:], buffers

    wrong = dataclasses.replace(shards, supply=Shorter([data], [5000], KIB))
    with pytest.raises(LayoutError, match="returned other segments than it was asked for"):
        sharded_digests(wrong, None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_beside_a_supply_stays_within_the_budget(algorithm):
    """8 MiB in columns on two ranks, windows of 256 KiB, a budget of 1 MiB each. Beside it the reference's chunks."""
    window, budget = 256 * KIB, 1 << 20
    data = random_bytes(11, 8 << 20)
    parts = [slices(number, data, 4096, window, algorithm) for number in range(2)]
    # the counts of the test's supply are no part of what is measured
    for part in parts:
        part.shards.supply._count = lambda rows: None
    tracemalloc.start()
    try:
        digest = combine(algorithm, data.size, parts, budget_bytes=budget)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest == digest_of(algorithm, data)
    # a scratch that is spoiled and the next one, per rank
    assert peak < 2 * (budget + 2 * window + (1 << 20))
