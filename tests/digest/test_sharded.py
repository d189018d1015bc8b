"""The checksum of a tensor from pieces of it equals the library's, whoever has which bytes; copies are compared."""

import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owners import KINDS, SIZES, columns, pieces_of, random_bytes, share_out

from gpusync.digest import (
    ALGORITHMS,
    Partial,
    ReplicaMismatchError,
    ShardedTensor,
    Shards,
    combine,
    digest_of,
    partial,
    sharded_digest,
    sharded_digests,
)
from gpusync.digest.sharded import BUDGET_BYTES
from gpusync.errors import DigestMismatchError, LayoutError, UnsupportedFormatError
from gpusync_kernels.segments import SegmentTable

# One block of sums costs a few hundred bytes: with this many every block is a batch, and every chain is cut.
TINY_BUDGET = 300


def partials_of(algorithm, data, shares, tensor="w"):
    return [partial(algorithm, data.size, pieces_of(data, ranges), tensor=tensor) for ranges in shares]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owners", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_library_for_every_size_and_ownership(algorithm, owners, kind):
    for size in SIZES:
        data = random_bytes(size, size)
        made = partials_of(algorithm, data, share_out(kind, size, owners, seed=owners))
        assert combine(algorithm, size, made) == digest_of(algorithm, data), size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_budget_of_one_block_changes_nothing(algorithm, kind):
    data = random_bytes(1, 9001)
    made = partials_of(algorithm, data, share_out(kind, data.size, 3, seed=7))
    assert combine(algorithm, data.size, made, budget_bytes=TINY_BUDGET) == digest_of(algorithm, data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_large_tensor_over_blocks_batches_and_odd_columns(algorithm):
    data = random_bytes(2, (1 << 20) + 13)
    shares = columns(data.size, 4099, 3, np.random.default_rng(3))
    made = partials_of(algorithm, data, shares)
    assert combine(algorithm, data.size, made, budget_bytes=400_000) == digest_of(algorithm, data)


@settings(max_examples=60)
@given(data=st.data())
def test_any_ownership(data):
    size = data.draw(st.sampled_from([*SIZES, 2049, 3000, 5000]), "size")
    owners = data.draw(st.integers(1, 4), "owners")
    edges = data.draw(st.lists(st.integers(0, size), max_size=12), "edges")
    edges = [0, *sorted(edges), size]
    shares = [[] for _ in range(owners)]
    for piece in itertools.pairwise(edges):
        # a piece has one owner or more; an owner may have it twice
        for owner in data.draw(st.lists(st.integers(0, owners - 1), min_size=1, max_size=3), "who"):
            shares[owner].append(piece)
    content = random_bytes(data.draw(st.integers(0, 9), "seed"), size)
    algorithm = data.draw(st.sampled_from(ALGORITHMS), "algorithm")
    budget = data.draw(st.sampled_from([TINY_BUDGET, BUDGET_BYTES]), "budget")
    made = partials_of(algorithm, content, shares)
    assert combine(algorithm, size, made, budget_bytes=budget) == digest_of(algorithm, content)


def test_pieces_may_be_of_any_dtype_and_from_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    words = np.arange(3000, dtype=np.uint16)
    parts = [
        (0, torch.from_numpy(words[:500].view(np.int16).copy()).view(torch.bfloat16)),
        (1000, words[500:1500].copy().view(np.float32)),
        (3000, torch.from_numpy(words[1500:].view(np.float64).copy())),
    ]
    made = [partial("xxh3-128", 6000, parts[:2]), partial("xxh3-128", 6000, parts[2:])]
    assert combine("xxh3-128", 6000, made) == digest_of("xxh3-128", words.view(np.uint8))


def test_partials_can_be_pickled():
    data = random_bytes(3, 5000)
    made = partials_of("xxh3-128", data, share_out("columns", 5000, 2, seed=1))
    assert combine("xxh3-128", 5000, pickle.loads(pickle.dumps(made))) == digest_of("xxh3-128", data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [17, 241, 5000, 300_000])
def test_a_differing_copy_of_a_whole_tensor_is_named(algorithm, size):
    data = random_bytes(4, size)
    other = data.copy()
    wrong = size * 2 // 3
    other[wrong] ^= 0x40
    made = [partial(algorithm, size, [(0, each)], tensor="norm") for each in (data, data.copy(), other, data)]
    with pytest.raises(DigestMismatchError) as caught:
        combine(algorithm, size, made)
    error = caught.value
    assert isinstance(error, ReplicaMismatchError)
    assert (error.tensor, error.rank, error.like_rank, error.first_byte) == ("norm", 2, 0, wrong)
    assert (error.expected, error.found) == (f"0x{data[wrong]:02x}", f"0x{other[wrong]:02x}")
    assert f"first at byte {wrong} in block {wrong // 1024}" in str(error)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_differing_copy_of_a_part_is_named(algorithm):
    """Four kv heads over eight ranks: ranks 2k and 2k + 1 have the same rows; and columns twice."""
    size, head = 8000, 2000
    data = random_bytes(5, size)
    shares = [[(head * (rank // 2), head * (rank // 2 + 1))] for rank in range(8)]
    made = partials_of(algorithm, data, shares)
    assert combine(algorithm, size, made) == digest_of(algorithm, data)
    other = data.copy()
    other[4500] ^= 1
    made[5] = partials_of(algorithm, other, [shares[5]])[0]
    with pytest.raises(ReplicaMismatchError) as caught:
        combine(algorithm, size, made)
    assert (caught.value.rank, caught.value.like_rank, caught.value.first_byte) == (5, 4, 4500)
    left, right = columns(size, 100, 2, np.random.default_rng(0))
    made = partials_of(algorithm, data, [left, right, right]) + partials_of(algorithm, other, [left])
    in_left = any(first <= 4500 < stop for first, stop in left)
    assert in_left
    with pytest.raises(ReplicaMismatchError) as caught:
        combine(algorithm, size, made)
    assert (caught.value.rank, caught.value.like_rank, caught.value.first_byte) == (3, 0, 4500)


def test_every_byte_that_is_held_twice_is_verified():
    """Overlapping pieces, one of them inside a rank: whichever byte of a second copy is wrong, it is found."""
    data = random_bytes(6, 3000)
    shares = [[(0, 1700)], [(1500, 3000), (2000, 2100)], [(100, 200), (1600, 2990)]]
    twice = [(0, 0, 100), (1, 0, 1500), (1, 1, 2000), (2, 1, 2500), (2, 0, 199), (2, 1, 2989), (0, 0, 1699)]
    assert combine("xxh3-128", 3000, partials_of("xxh3-128", data, shares)) == digest_of("xxh3-128", data)
    for owner, piece, byte in twice:
        pieces = [pieces_of(data, ranges) for ranges in shares]
        offset, buffer = pieces[owner][piece]
        buffer[byte - offset] ^= 0xFF
        with pytest.raises(ReplicaMismatchError) as caught:
            combine("xxh3-128", 3000, [partial("xxh3-128", 3000, each, tensor="w") for each in pieces])
        assert caught.value.first_byte == byte
        assert owner in (caught.value.rank, caught.value.like_rank)


def test_two_copies_on_one_rank_are_compared():
    data = random_bytes(7, 2000)
    other = data.copy()
    other[1999] ^= 2
    tied = ShardedTensor(name="embed", algorithm="xxh3-128", nbytes=2000, pieces=[(0, data), (0, data.copy())])
    assert sharded_digests([tied], None).digests == (digest_of("xxh3-128", data),)
    torn = ShardedTensor(name="embed", algorithm="xxh3-128", nbytes=2000, pieces=[(0, data), (0, other)])
    with pytest.raises(ReplicaMismatchError, match="rank 0 has two copies with different bytes") as caught:
        sharded_digests([torn], None)
    assert caught.value.first_byte == 1999


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("shares", "missing"),
    [
        ([[(0, 1000)], [(1001, 2000)]], 1000),
        ([[(1, 2000)], []], 0),
        ([[(0, 1999)], [(5, 700)]], 1999),
        ([[], []], 0),
        ([[(row, row + 4) for row in range(0, 2000, 10)], [(row + 5, row + 10) for row in range(0, 2000, 10)]], 4),
    ],
)
def test_a_byte_on_no_rank_is_a_layout_error(algorithm, shares, missing):
    data = random_bytes(8, 2000)
    with pytest.raises(LayoutError) as caught:
        combine(algorithm, 2000, partials_of(algorithm, data, shares, tensor="gap"))
    assert caught.value.tensor == "gap"
    assert caught.value.found == f"none from {missing} on"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(990, np.zeros(11, np.uint8))], "leaves its tensor"),
        ([(-1, np.zeros(4, np.uint8))], "leaves its tensor"),
        ([(0, np.zeros((4, 4), np.uint8)[:, :2])], "not contiguous"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces, text):
    with pytest.raises(LayoutError, match=text) as caught:
        partial("xxh3-128", 1000, pieces, tensor="w")
    assert caught.value.tensor == "w"


def test_what_cannot_be_combined_is_refused():
    data = random_bytes(9, 10)
    made = partial("xxh3-128", 10, [(0, data)])
    for algorithm, nbytes in (("blake3", 10), ("xxh3-128", 11)):
        with pytest.raises(LayoutError, match="another tensor"):
            combine(algorithm, nbytes, [made])
    with pytest.raises(UnsupportedFormatError):
        partial("md5", 10, [(0, data)])
    with pytest.raises(LayoutError, match="negative size"):
        partial("xxh3-128", -1, [])
    with pytest.raises(LayoutError, match="on no rank"):
        combine("xxh3-128", 10, [])
    assert combine("xxh3-128", 0, []) == digest_of("xxh3-128", b"")


def test_many_tensors_from_one_table_without_a_group():
    sizes = [*SIZES, 3000, 70_001]
    data = [random_bytes(n, n) for n in sizes]
    algorithms = [ALGORITHMS[n % 3] for n in range(len(sizes))]
    buffer = np.concatenate(data)
    table = SegmentTable.flat(
        dst_offset=np.cumsum(sizes) - sizes, src=np.arange(len(sizes)), src_offset=0, nbytes=np.array(sizes)
    )
    shards = Shards(
        names=tuple(map(str, sizes)),
        algorithms=tuple(algorithms),
        nbytes=np.array(sizes),
        table=table,
        buffers=(buffer,),
    )
    report = sharded_digests(shards, None)
    assert list(report.digests) == [digest_of(a, each) for a, each in zip(algorithms, data, strict=True)]
    assert report.traffic.nbytes == 0
    assert sharded_digest("blake3", data[-1].size, [(0, data[-1])], None) == digest_of("blake3", data[-1])
    assert sharded_digests([], None).digests == ()


def test_names_that_cannot_be_told_are_an_error_and_not_a_hang():
    shards = Shards.of([ShardedTensor(name=b"w", algorithm="blake3", nbytes=1, pieces=[(0, np.zeros(1, np.uint8))])])
    with pytest.raises(TypeError):
        sharded_digests(shards, None)


def test_buffers_of_a_table_have_to_be_contiguous():
    with pytest.raises(LayoutError, match="not contiguous"):
        Shards(
            names=("w",),
            algorithms=("blake3",),
            nbytes=np.array([4]),
            table=SegmentTable.flat(nbytes=4),
            buffers=(np.zeros((4, 4), np.uint8)[:, :2],),
        )


def test_a_table_that_leaves_its_buffers_or_tensors_is_refused():
    for columns_, text in (
        ({"src": 1, "nbytes": 5}, "more tensors than there are"),
        ({"dst": 1, "nbytes": 5}, "more buffers than there are"),
        ({"nbytes": 11}, "leaves one of its tensors"),
        ({"dst_offset": 3, "nbytes": 8}, "leaves one of its buffers"),
    ):
        with pytest.raises(LayoutError, match=text):
            Shards(
                names=("w",),
                algorithms=("blake3",),
                nbytes=np.array([10]),
                table=SegmentTable.flat(**columns_),
                buffers=(np.zeros(10, np.uint8),),
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_memory_stays_within_the_budget(algorithm, kind):
    """8 MiB over two owners, a budget of 2 MiB each. Beside it the reference's own chunks: 1 MiB."""
    rows, width, budget = 2048, 4096, 2 << 20
    data = random_bytes(10, rows * width).reshape(rows, width)
    halves = (
        [data[:, : width // 2], data[:, width // 2 :]] if kind == "columns" else [data[: rows // 2], data[rows // 2 :]]
    )
    made = []
    for number, half in enumerate(map(np.ascontiguousarray, halves)):
        whole = {"dst": 0, "dst_offset": 0, "src": 0}
        table = (
            SegmentTable.strided(
                **whole,
                dst_stride=width // 2,
                src_offset=number * width // 2,
                src_stride=width,
                rows=rows,
                row_bytes=width // 2,
            )
            if kind == "columns"
            else SegmentTable.flat(**whole, src_offset=number * half.size, nbytes=half.size)
        )
        shards = Shards(
            names=("w",),
            algorithms=(algorithm,),
            nbytes=np.array([data.size]),
            table=table,
            buffers=(half.reshape(-1),),
        )
        made.append(Partial(shards))
    tracemalloc.start()
    try:
        digest = combine(algorithm, data.size, made, budget_bytes=budget)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest == digest_of(algorithm, data.reshape(-1))
    assert peak < 2 * (budget + (1 << 20))
