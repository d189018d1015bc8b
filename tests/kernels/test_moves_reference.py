"""copy, xor, overwrite, planes and cast on the host: numpy and torch buffers, against loops over single bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    assert_same_bytes,
    brute_pairs,
    extent,
    flat_cases,
    poisoned,
    random_bytes,
    strided_cases,
)

from gpusync_kernels import (
    Change,
    Planes,
    SegmentTable,
    apply_step_planes,
    bind_casts,
    bind_changes,
    bind_moves,
    bind_planes,
    cast_segments,
    copy_segments,
    keep_old_words,
    overwrite_words,
    read_full_planes,
    read_step_planes,
    restore_cast,
    restore_old_words,
    revert_step_planes,
    using_host_ops,
    write_full_planes,
    xor_segments,
    xor_words,
)
from gpusync_kernels.cast import FORMATS, narrow, widen
from support.loops import loops_of


def as_torch(array):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.from_numpy(array)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("cases", [flat_cases, strided_cases])
@pytest.mark.parametrize("operation", [copy_segments, xor_segments])
def test_every_byte_moves(operation, cases, kind):
    rng = np.random.default_rng(0)
    table = cases()
    dst = [random_bytes(rng, size) for size in extent(table, "dst")]
    src = [random_bytes(rng, size) for size in extent(table, "src")]
    expected = [buffer.copy() for buffer in dst]
    to, to_byte, at, at_byte = np.array(brute_pairs(table)).T
    for buffer in range(len(dst)):
        some = to == buffer
        values = np.stack([each[np.minimum(at_byte[some], each.size - 1)] for each in src])[
            at[some], np.arange(some.sum())
        ]
        old = expected[buffer][to_byte[some]]
        expected[buffer][to_byte[some]] = values if operation is copy_segments else old ^ values
    wrap = as_torch if kind == "torch" else lambda array: array
    operation(bind_moves(table, dst=[wrap(each) for each in dst], src=[wrap(each) for each in src]))
    for found, wanted in zip(dst, expected, strict=True):
        assert_same_bytes(found, wanted)


def test_params_of_any_dtype_are_bytes():
    """A bfloat16 parameter that requires a gradient, a 0-d bool and a 2-d float32 array."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    param = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    flag, matrix = torch.zeros((), dtype=torch.bool), np.zeros((2, 3), np.float32)
    source = np.arange(1, 50, dtype=np.uint8)
    table = SegmentTable.flat(dst=[0, 1, 2], dst_offset=[2, 0, 20], src_offset=[0, 0, 30], nbytes=[22, 1, 4])
    copy_segments(bind_moves(table, dst=[param, flag, matrix], src=[source]))
    assert param.data_ptr() == param.detach().view(torch.uint8).data_ptr()
    assert_same_bytes(param.detach().view(torch.uint8).numpy(), np.concatenate([[0, 0], source[:22]]).astype(np.uint8))
    assert flag.item() is True
    assert_same_bytes(matrix, np.concatenate([np.zeros(20), source[30:34]]).astype(np.uint8))


def test_buffers_of_different_memories_are_refused(monkeypatch):
    from gpusync_kernels import buffers

    monkeypatch.setattr(buffers, "_device", lambda buffer: "cuda:0" if buffer[0] == 1 else None)
    with pytest.raises(ValueError, match="different memories"):
        bind_moves(SegmentTable.flat(nbytes=1), dst=[np.ones(1, np.uint8)], src=[np.zeros(1, np.uint8)])


@given(st.data())
def test_words_at_positions(data):
    """A [5, 7] tensor of which columns a..b are held: written, xored, kept and put back."""
    e = data.draw(st.sampled_from([1, 2, 4, 8]))
    first, width = data.draw(st.tuples(st.integers(0, 4), st.integers(1, 3)))
    positions = data.draw(st.lists(st.integers(0, 34), unique=True))
    offset = data.draw(st.integers(0, 3))
    wide = data.draw(st.sampled_from([np.uint32, np.uint64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    table = SegmentTable.strided(
        dst_offset=offset,
        dst_stride=(width + 1) * e,
        src_offset=first * e,
        src_stride=7 * e,
        rows=5,
        row_bytes=width * e,
    )
    live = random_bytes(rng, offset + 5 * (width + 1) * e)
    words, old = random_bytes(rng, len(positions) * e), poisoned(len(positions) * e)
    written, xored, kept = live.copy(), live.copy(), old.copy()
    for i, position in enumerate(positions):
        row, column = divmod(position, 7)
        if first <= column < first + width:
            at = slice(offset + (row * (width + 1) + column - first) * e, None)
            written[at][:e] = words[i * e :][:e]
            xored[at][:e] ^= words[i * e :][:e]
            kept[i * e :][:e] = live[at][:e]
    change = Change(source=0, positions=np.array(positions, wide), words=words, old=old)
    found = live.copy()
    bound = bind_changes(table, dst=[found], changes=[change], element_bytes=e)
    keep_old_words(bound)
    assert_same_bytes(old, kept, "kept")
    overwrite_words(bound)
    assert_same_bytes(found, written, "written")
    restore_old_words(bound)
    assert_same_bytes(found, live, "restored")
    xor_words(bound)
    assert_same_bytes(found, xored, "xored")


@pytest.mark.parametrize("loops", ["numpy", "numba"])
@given(data=st.data())
def test_words_at_positions_of_one_run(loops, data):
    """Elements first..first + width of a tensor, at any address; positions count from an element of their own."""
    e = data.draw(st.sampled_from([1, 2, 4, 8]))
    first, width = data.draw(st.tuples(st.integers(0, 30), st.integers(1, 40)))
    start, offset = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 9)))
    positions = data.draw(st.lists(st.integers(0, 60), unique=True))
    wide = data.draw(st.sampled_from([np.uint32, np.uint64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    live, words = random_bytes(rng, offset + (width + 3) * e), random_bytes(rng, len(positions) * e)
    written, xored = live.copy(), live.copy()
    for i, position in enumerate(positions):
        at = slice(offset + (start + position - first) * e, offset + (start + position - first + 1) * e)
        if first <= start + position < first + width:
            written[at] = words[i * e :][:e]
            xored[at] ^= words[i * e :][:e]
    table = SegmentTable.flat(dst_offset=offset, src_offset=first * e, nbytes=width * e)
    change = Change(source=0, positions=np.array(positions, wide), words=words, first_element=start)
    for operation, expected in ((overwrite_words, written), (xor_words, xored)):
        found = live.copy()
        with using_host_ops(loops_of(loops)):
            operation(bind_changes(table, dst=[found], changes=[change], element_bytes=e))
        assert_same_bytes(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.zeros(2, np.uint32), "words": np.zeros(3, np.uint8)}, "3 bytes of words, expected 2 times 2"),
        ({"positions": np.zeros(2, np.uint16), "words": np.zeros(4, np.uint8)}, "expected all of 4 or all of 8"),
    ],
)
def test_changes_of_a_wrong_size_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        bind_changes(
            SegmentTable.flat(nbytes=8),
            dst=[np.zeros(8, np.uint8)],
            changes=[Change(source=0, **change)],
            element_bytes=2,
        )


def test_a_segment_that_cuts_an_element_is_refused():
    change = Change(source=0, positions=np.zeros(1, np.uint32), words=np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="segment of source 0 cuts an element of 4 bytes: src_offset 2"):
        bind_changes(
            SegmentTable.flat(src_offset=2, nbytes=4), dst=[np.zeros(8, np.uint8)], changes=[change], element_bytes=4
        )


def test_old_words_need_a_place():
    change = Change(source=0, positions=np.zeros(1, np.uint32), words=np.zeros(1, np.uint8))
    bound = bind_changes(SegmentTable.flat(nbytes=8), dst=[np.zeros(8, np.uint8)], changes=[change])
    with pytest.raises(ValueError, match="without a buffer for old words"):
        keep_old_words(bound)


def test_planes_of_the_module_docstring():
    words = np.array([0x0102, 0x0304], np.uint16)
    raw = poisoned(4)
    table = SegmentTable.flat(nbytes=4)
    read_full_planes(bind_planes(table, dst=[words], planes=[Planes(data=raw, element_bytes=2)]))
    assert raw.tolist() == [0x02, 0x04, 0x01, 0x03]
    new, old = np.array([6, 3], np.uint16), np.array([5, 5], np.uint16)
    read_step_planes(bind_planes(table, dst=[new], old=[old], planes=[Planes(data=raw, element_bytes=2)]))
    assert raw.tolist() == [0x02, 0x03, 0x00, 0x00]


@given(st.data())
def test_planes_go_there_and_back(data):
    e, order = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(0, 1))
    rows, columns, first, width = data.draw(st.tuples(*[st.integers(1, 9)] * 4))
    columns += first + width
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    table = SegmentTable.strided(
        dst_stride=width * e, src_offset=first * e, src_stride=columns * e, rows=rows, row_bytes=width * e
    )
    old, new = random_bytes(rng, rows * width * e), random_bytes(rng, rows * width * e)
    raw = poisoned(rows * columns * e)
    planes = [Planes(data=raw, element_bytes=e, order=order)]
    read_step_planes(bind_planes(table, dst=[new], old=[old], planes=planes))
    live = old.copy()
    bound = bind_planes(table, dst=[live], planes=planes)
    apply_step_planes(bound)
    assert_same_bytes(live, new, "stepped")
    revert_step_planes(bound)
    assert_same_bytes(live, old, "stepped back")
    read_full_planes(bind_planes(table, dst=[new], planes=planes))
    write_full_planes(bound)
    assert_same_bytes(live, new, "full")
    outside = raw.reshape(e, rows, columns)
    assert (outside[:, :, :first] == 0xA5).all()
    assert (outside[:, :, first + width :] == 0xA5).all()


TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"}


@pytest.mark.parametrize("dst_dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("src_dtype", list(TORCH))
def test_numbers_convert_as_torch_does(src_dtype, dst_dtype):
    """Every pattern of 8 and 16 bits, four million of 32; only NaNs, where torch itself is not of one mind, are left
    out.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    nbytes = FORMATS[src_dtype].nbytes
    count = 1 << min(8 * nbytes, 22)
    words = np.random.default_rng(1).integers(0, 1 << 32, count, dtype=np.uint32) if nbytes == 4 else np.arange(count)
    if nbytes == 4:
        exact = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
        words = np.concatenate([words, *(exact + np.uint32(tie) for tie in (0, 0x7FFF, 0x8000, 0x8001, 0x1000))])
    words = words.astype(f"<u{nbytes}")
    source = torch.from_numpy(words.view(np.uint8)).view(getattr(torch, TORCH[src_dtype]))
    expected = source.to(torch.float32).to(getattr(torch, TORCH[dst_dtype]))
    found = poisoned(words.size * FORMATS[dst_dtype].nbytes)
    table = SegmentTable.flat(nbytes=words.size)
    cast_segments(bind_casts(table, dst=[found], dst_dtypes=[dst_dtype], src=[words], src_dtypes=[src_dtype]))
    number = ~torch.isnan(source.to(torch.float32)).numpy()
    bits = found.view(f"<u{FORMATS[dst_dtype].nbytes}")
    assert_same_bytes(bits[number], expected.view(torch.uint8).numpy().view(bits.dtype)[number])
    back = torch.from_numpy(found).view(getattr(torch, TORCH[dst_dtype])).to(torch.float32)
    assert torch.isnan(back).numpy()[~number].all()


def test_casts_of_the_docstrings():
    assert widen(np.array([1], np.uint16), FORMATS["F16"]).tolist() == [0x33800000]
    assert widen(np.array([0x3F80], np.uint16), FORMATS["BF16"]).tolist() == [0x3F800000]
    assert narrow(np.array([0x3F808000], np.uint32), FORMATS["BF16"]).tolist() == [0x3F80]
    nans = np.array([0x7F800001, 0xFFC12345], np.uint32)
    assert narrow(nans, FORMATS["BF16"]).tolist() == [0x7FC0, 0xFFC0]
    assert narrow(nans, FORMATS["F16"]).tolist() == [0x7E00, 0xFE00]


def test_a_cast_is_undone():
    live = np.arange(10, dtype=np.float32)
    source = np.arange(100, 110, dtype=np.float16)
    table = SegmentTable.flat(dst_offset=[1, 7], src_offset=[0, 5], nbytes=[3, 2])
    names = {"dst_dtypes": ["F32"], "src_dtypes": ["F16"]}
    old = poisoned(bind_casts(table, dst=[live], src=[source], **names).old_bytes)
    bound = bind_casts(table, dst=[live], src=[source], old=old, **names)
    cast_segments(bound)
    assert live.tolist() == [0, 100, 101, 102, 4, 5, 6, 105, 106, 9]
    restore_cast(bound)
    assert live.tolist() == list(range(10))
    with pytest.raises(ValueError, match="no cast for"):
        bind_casts(table, dst=[live], src=[source], dst_dtypes=["F8_E4M3"], src_dtypes=["F16"])
