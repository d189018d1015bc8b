"""Which rank runs which blocks of a chain, and batches that a budget bounds."""

import numpy as np
import pytest

from gpusync.digest import routes as routes_module
from gpusync.digest.intervals import ByTensor, flat_rows
from gpusync.digest.routes import Routes
from gpusync_kernels.segments import SegmentTable


def routes_of(nbytes: int, *ranks, tensors: int = 1) -> Routes:
    rows = [np.concatenate([flat_rows(*zip(*ranges, strict=True), t) for t in range(tensors)]) for ranges in ranks]
    every = np.arange(tensors)
    return Routes([ByTensor(each, tensors) for each in rows], every, np.full(tensors, nbytes), np.zeros(tensors, int))


def test_a_block_is_in_the_chain_of_the_rank_that_has_its_first_byte():
    """1,500 and 2,048 are the boundaries; 5 blocks, the last the 904 bytes after 4 whole ones."""
    routes = routes_of(5000, [(0, 1500)], [(1500, 2048)], [(2048, 5000)])
    assert routes.runs.tolist() == [[0, 0, 2, 0], [0, 2, 5, 2]]
    assert routes.last_rank.tolist() == [2]


def test_columns_and_very_many_pieces_have_one_chain_each_in_turn():
    pieces = [(at, at + 1024) for at in range(0, 200 * 1024, 1024)]
    routes = routes_of(200 * 1024, pieces[::2], pieces[1::2], tensors=4)
    assert routes.runs.tolist() == [[t, 0, 200, t % 2] for t in range(4)]
    few = routes_of(60 * 1024, pieces[:60:2], pieces[1:60:2])
    assert len(few.runs) == 60 <= routes_module.MAX_RUNS
    halves = [
        SegmentTable.strided(
            dst=0, dst_offset=0, dst_stride=50, src=0, src_offset=at, src_stride=100, rows=50, row_bytes=50
        ).rows
        for at in (0, 50)
    ]
    routes = Routes([ByTensor(rows, 1) for rows in halves], np.array([0]), np.array([5000]), np.array([0]))
    assert routes.runs.tolist() == [[0, 0, 5, 0]]


@pytest.mark.parametrize("budget", [1, 1000, 20_000, 1 << 30])
def test_batches_cover_every_block_once_in_order(budget):
    routes = routes_of(50_001, [(0, 20_000)], [(20_000, 50_001)], tensors=7)
    seen = []
    for batch in routes.batches(budget):
        assert len(set(batch.tensors.tolist())) == len(batch.tensors)
        runs = routes.runs_in(batch)
        for number, tensor in enumerate(batch.tensors.tolist()):
            mine = runs.tensor == number
            assert runs.first[mine][0] == batch.first[number]
            assert runs.stop[mine][-1] == batch.stop[number]
            assert (runs.first[mine][1:] == runs.stop[mine][:-1]).all()
            assert runs.number[mine].tolist() == list(range(int(mine.sum())))
            seen += [(tensor, block) for block in range(batch.first[number], batch.stop[number])]
    assert seen == [(tensor, block) for tensor in range(7) for block in range(49)]


def test_a_run_cut_by_a_batch_goes_on_with_the_same_rank():
    routes = routes_of(10 * 1024, [(0, 5 * 1024)], [(5 * 1024, 10 * 1024)])
    after = [(run.stop.tolist(), run.next_rank.tolist()) for run in map(routes.runs_in, routes.batches(250))]
    flat = [(stop, after) for stops, nexts in after for stop, after in zip(stops, nexts, strict=True)]
    assert flat[-1] == (10, -1)
    assert all(next_rank == (0 if stop < 5 else 1) for stop, next_rank in flat[:-1])
