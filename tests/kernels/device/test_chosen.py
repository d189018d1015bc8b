"""Data and tables that hypothesis chooses, on the device against the references."""

from __future__ import annotations

import numpy as np
import pytest
from gs01_blobs import changed_words, encode_blob
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bytes, extent, random_bytes, tables

from gpusync_kernels import (
    Change,
    Payload,
    SegmentTable,
    SumsLayout,
    adler32_partials,
    bind_adler32,
    bind_changes,
    bind_moves,
    bind_sparse,
    bind_sums,
    copy_segments,
    fingerprints,
    overwrite_words,
    parse_blob,
    sparse_apply,
    xor_segments,
)

pytestmark = pytest.mark.gpu

FEW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spread(table: SegmentTable) -> SegmentTable:
    """The same segments in buffers of their own: destinations of one table must not overlap."""
    rows = table.rows.copy()
    rows["dst"] = np.arange(len(rows))
    return SegmentTable(rows)


@FEW
@given(tables(), st.sampled_from([copy_segments, xor_segments]), st.integers(0, 15), st.integers(0, 15))
def test_moves(place, table, operation, dst_phase, src_phase):
    rng = np.random.default_rng(dst_phase)
    table = spread(table)
    dst, src = (
        [random_bytes(rng, n) for n in extent(table, "dst")],
        [random_bytes(rng, n) for n in extent(table, "src")],
    )
    there = [place(each, dst_phase) for each in dst]
    operation(bind_moves(table, dst=there, src=[place(each, src_phase) for each in src]))
    operation(bind_moves(table, dst=dst, src=src))
    for found, expected in zip(there, dst, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected)


@settings(FEW, max_examples=5)  # the slowest kernel under the interpreter
@given(tables(), st.integers(0, 15))
def test_sums_of_any_table(place, table, phase):
    """Fingerprints cover sums, cut words, tails and chain; adler32 beside them."""
    table = spread(table)
    layout = SumsLayout.of([max(400, *extent(table, "src"))])
    held = [random_bytes(np.random.default_rng(phase), n) for n in extent(table, "dst")]
    there = [place(each, phase) for each in held]
    found, expected = (fingerprints(bind_sums(table, layout, dst=each)) for each in (there, held))
    assert_same_bytes(found, expected)
    found, expected = (adler32_partials(bind_adler32(table, layout.nbytes, dst=each)) for each in (there, held))
    assert_same_bytes(found, expected)


@FEW
@given(tables(), st.lists(st.integers(0, 400), unique=True, max_size=80), st.booleans())
def test_words_of_any_table(place, table, positions, wide):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    table = spread(table)
    rng = np.random.default_rng(len(positions))
    live, words = [random_bytes(rng, n) for n in extent(table, "dst")], random_bytes(rng, len(positions))
    there = [place(each) for each in live]
    array = np.array(positions, np.uint64 if wide else np.uint32)
    bits = place(array).view(torch.int64 if wide else torch.int32)
    overwrite_words(bind_changes(table, dst=there, changes=[Change(source=0, positions=bits, words=place(words))]))
    overwrite_words(bind_changes(table, dst=live, changes=[Change(source=0, positions=array, words=words)]))
    for found, expected in zip(there, live, strict=True):
        assert_same_bytes(found.cpu().numpy(), expected)


@FEW
@given(st.data())
def test_blobs_at_any_address(place, data):
    """A blob off a multiple of 8 is copied; a slice of columns takes its part."""
    e, order = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(0, 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from(["small", "any", "edges"]))
    count, density = data.draw(st.integers(1, 1500)), data.draw(st.sampled_from([0.01, 0.5, 1.0]))
    old, new = changed_words(rng, count, element_bytes=e, order=order, density=density, kind=kind)
    blob = np.frombuffer(encode_blob(old, new, order=order, part_log2=10), np.uint8)
    columns = data.draw(st.integers(1, count))
    width = data.draw(st.integers(1, columns))
    rows = count // columns
    table = SegmentTable.strided(dst_stride=width * e, src_stride=columns * e, rows=rows, row_bytes=width * e)
    held, expected = (
        np.ascontiguousarray(words[: rows * columns].reshape(rows, columns)[:, :width]) for words in (old, new)
    )
    buffer = place(held)
    payload = Payload(
        source=0, data=place(blob, data.draw(st.sampled_from([0, 8, 3]))), blob=parse_blob(blob, blob.size)
    )
    sparse_apply(bind_sparse(table, dst=[buffer], payloads=[payload]))
    assert_same_bytes(buffer.cpu().numpy(), expected)
