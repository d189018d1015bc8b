"""Safetensors headers: round trip, and the safetensors library as the judge of both directions."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import HeaderError, Where
from gpusync.stream import (
    DTYPE_BITS,
    ShortShardError,
    SourceFile,
    TensorSpec,
    encode_header,
    parse_header,
    read_header,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    if DTYPE_BITS[dtype] < 8:
        shape = (*shape, 4)  # a whole number of bytes for 4 and for 6 bits
    return TensorSpec(
        name=draw(NAMES), dtype=dtype, shape=shape, nbytes=int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8
    )


TABLES = st.lists(specs(), max_size=8, unique_by=lambda spec: spec.name)


@given(TABLES, st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]))))
def test_round_trip(tensors: list[TensorSpec], metadata: dict[str, str]) -> None:
    raw = encode_header(tensors, metadata)
    assert len(raw) % 8 == 0
    assert struct.unpack("<Q", raw[:8]) == (len(raw) - 8,)
    header = parse_header(raw[8:])
    assert header.metadata == metadata
    assert header.data_offset == len(raw)
    assert header.file_bytes == len(raw) + sum(tensor.nbytes for tensor in tensors)
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors.values()] == [
        (t.name, t.dtype, t.shape, t.nbytes) for t in tensors
    ]
    offset = len(raw)
    for tensor in header.tensors.values():
        assert (tensor.offset, tensor.end) == (offset, offset + tensor.nbytes)
        offset = tensor.end


@given(TABLES)
def test_safetensors_reads_what_we_write(tensors: list[TensorSpec]) -> None:
    raw = encode_header(tensors, {"format": "pt"})
    data = bytes(sum(tensor.nbytes for tensor in tensors))
    found = dict(safetensors.deserialize(raw + data))
    assert {name: (facts["dtype"], tuple(facts["shape"])) for name, facts in found.items()} == {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors
    }


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    """Its writer sorts by alignment, so header order and file order differ, and it writes names as raw UTF-8."""
    tensors = {
        "層.bias": np.arange(3, dtype=np.int8),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 7), np.float64),
        "odd": np.arange(35, dtype=np.float16).reshape(5, 7),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np", "ключ": "значение"})
    with SourceFile(path) as file:
        header = read_header(file, where=Where(version=2))
        assert header.metadata == {"format": "np", "ключ": "значение"}
        assert header.file_bytes == path.stat().st_size
        assert header.tensors.keys() == tensors.keys()
        for name, array in tensors.items():
            entry = header.tensors[name]
            assert entry.shape == array.shape
            assert file.read_at(entry.offset, entry.nbytes) == array.tobytes()


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_short_file_is_told_apart(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    raw = encode_header([TensorSpec(name="w", dtype="F32", shape=(1,), nbytes=4)], {}) + b"abcd"
    path.write_bytes(raw[:-cut])
    with SourceFile(path) as file, pytest.raises(ShortShardError) as caught:
        read_header(file, where=Where(version=2))
    assert (caught.value.path, caught.value.version, caught.value.found) == (str(path), 2, len(raw) - cut)
    assert caught.value.expected in (len(raw), len(raw) - 4)


@pytest.mark.parametrize("shape", [(3,), (1, 2), (0,), (2**40, 2**40), ()])
def test_unknown_dtype_is_carried_as_bytes(shape: tuple[int, ...]) -> None:
    """A newer safetensors may know it. Its width is not known, so its shape says nothing of its bytes."""
    raw = encode_header([TensorSpec(name="w", dtype="F2_NEXT", shape=shape, nbytes=5)], {})
    assert parse_header(raw[8:]).tensors["w"].nbytes == 5


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "fits"),
    [
        ("F4", (2,), 1, True),
        ("F4", (3,), 2, False),
        ("F6_E2M3", (4,), 3, True),
        ("F6_E3M2", (5,), 4, False),
        ("C64", (3,), 24, True),
        ("F64", (), 8, True),
        ("BOOL", (0, 2**40), 0, True),
        ("U8", (2**62, 2), 2**63, False),
    ],
)
def test_size_follows_from_shape_and_dtype(dtype: str, shape: tuple[int, ...], nbytes: int, fits: bool) -> None:
    spec = TensorSpec(name="w", dtype=dtype, shape=shape, nbytes=nbytes)
    if fits:
        assert parse_header(encode_header([spec], {})[8:]).tensors["w"].nbytes == nbytes
    else:
        with pytest.raises(HeaderError) as caught:
            encode_header([spec], {})
        assert caught.value.tensor == "w"


@pytest.mark.parametrize("names", [["w", "w"], ["__metadata__"], ["\ud800"], ["n" * 4097]])
def test_writer_refuses_what_no_reader_takes(names: list[str]) -> None:
    with pytest.raises(HeaderError):
        encode_header([TensorSpec(name=name, dtype="U8", shape=(1,), nbytes=1) for name in names], {"format": "pt"})


def test_keys_of_a_newer_format_are_left_alone() -> None:
    text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}}   '
    assert parse_header(text).tensors["w"].offset == 8 + len(text)


def test_number_of_dimensions_is_bounded() -> None:
    def spec(rank: int) -> TensorSpec:
        return TensorSpec(name="w", dtype="U8", shape=(1,) * rank, nbytes=1)

    assert len(parse_header(encode_header([spec(64)], {})[8:]).tensors["w"].shape) == 64
    with pytest.raises(HeaderError) as caught:
        encode_header([spec(65)], {})
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("w", 64, 65)
