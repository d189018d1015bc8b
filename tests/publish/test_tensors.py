"""Whatever a trainer holds becomes the bytes that safetensors would store."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from gpusync.errors import PublishError, VersionMissingError
from gpusync.publish import CheckpointTensors, StoredBytes
from gpusync.publish.changes import read_whole
from gpusync.publish.tensors import iterate_offers, make_offer
from support.checkpoints import small_state, write_checkpoint

TORCH_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def described(tensor, *, copy=False):
    made = make_offer("t", tensor, copy=copy)
    return made.form.dtype, made.form.shape, read_whole(made.data).tobytes()


@pytest.mark.parametrize(("dtype", "name"), TORCH_DTYPES.items(), ids=TORCH_DTYPES.values())
@pytest.mark.parametrize("copy", [False, True])
def test_every_torch_dtype_keeps_its_bytes(dtype, name, copy):
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    expected = name, (2, 3), raw.numpy().tobytes()
    assert described(raw.view(dtype).reshape(2, 3), copy=copy) == expected


def test_packed_pairs_count_as_safetensors_counts_them():
    raw = torch.arange(8, dtype=torch.uint8)
    assert described(raw.reshape(4, 2).view(torch.float4_e2m1fn_x2)) == ("F4", (4, 4), bytes(range(8)))


@pytest.mark.parametrize("copy", [False, True])
def test_views_of_torch_tensors_are_laid_out_anew(copy):
    whole = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    expected = whole.numpy()
    assert described(whole.t(), copy=copy) == ("I16", (6, 4), np.ascontiguousarray(expected.T).tobytes())
    assert described(whole[1:, ::2], copy=copy) == ("I16", (3, 3), np.ascontiguousarray(expected[1:, ::2]).tobytes())
    assert described(whole[2], copy=copy) == ("I16", (6,), expected[2].tobytes())
    assert described(torch.zeros(2, dtype=torch.complex64).conj() + 1j, copy=copy)[1] == (2,)


def test_scalars_nothing_and_parameters():
    assert described(torch.tensor(1.5)) == ("F32", (), np.float32(1.5).tobytes())
    assert described(torch.empty(0, 7, dtype=torch.bfloat16)) == ("BF16", (0, 7), b"")
    assert described(torch.nn.Parameter(torch.ones(2))) == ("F32", (2,), np.ones(2, np.float32).tobytes())
    assert described(np.float16(2)) == ("F16", (), np.float16(2).tobytes())
    assert described(np.empty((3, 0), np.int8)) == ("I8", (3, 0), b"")
    assert described(StoredBytes(dtype="F8_E4M3", shape=(0,), data=b"")) == ("F8_E4M3", (0,), b"")


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8"])
def test_numpy_arrays_of_any_layout(dtype):
    array = np.arange(24).reshape(4, 6).astype(dtype)
    assert described(array.T)[1:] == ((6, 4), np.ascontiguousarray(array.T).tobytes())
    assert described(array.astype(array.dtype.newbyteorder(">"))) == described(array)


def test_numpy_arrays_of_ml_dtypes():
    import ml_dtypes

    raw = np.arange(12, dtype=np.uint8)
    assert described(raw.view(ml_dtypes.bfloat16).reshape(2, 3)) == ("BF16", (2, 3), raw.tobytes())
    assert described(raw.view(ml_dtypes.float8_e4m3fn)) == ("F8_E4M3", (12,), raw.tobytes())


@pytest.mark.parametrize("kind", ["torch", "numpy", "stored"])
def test_copy_separates_from_the_callers_memory(kind):
    memory = np.zeros(4, np.uint8)
    tensor = {"torch": torch.from_numpy(memory), "numpy": memory}.get(
        kind, StoredBytes(dtype="U8", shape=(4,), data=memory)
    )
    borrowed, copied = (make_offer("t", tensor, copy=copy) for copy in (False, True))
    memory[:] = 7
    assert read_whole(borrowed.data).tolist() == [7] * 4
    assert read_whole(copied.data).tolist() == [0] * 4


class Sharded(torch.Tensor):
    def full_tensor(self):
        raise AssertionError("a collective that only the caller may start")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ([1, 2], "not a tensor"),
        (None, "not a tensor"),
        (np.array(["text"]), "no such dtype"),
        (np.zeros(1, np.complex128), "no such dtype"),
        (torch.zeros(2, device="meta"), "no plain bytes"),
        (torch.zeros(2, 2).to_sparse(), "no plain bytes"),
        (torch.zeros(2).as_subclass(Sharded), "full_tensor"),
        (StoredBytes(dtype="F32", shape=(2,), data=b"1234567"), "do not make up"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_plain_bytes_is_refused_by_name(tensor, text):
    with pytest.raises(PublishError, match=text) as caught:
        make_offer("some.weight", tensor, copy=False)
    assert caught.value.tensor == "some.weight"


@pytest.mark.parametrize("name", ["__metadata__", "n" * 5000, "\ud800", 7])
def test_names_no_file_can_hold_are_refused(name):
    with pytest.raises(PublishError):
        make_offer(name, np.zeros(1), copy=False)


def test_a_name_comes_once():
    offers = iterate_offers(iter([("a", np.zeros(1)), ("a", np.zeros(1))]), copy=True)
    next(offers)
    with pytest.raises(PublishError, match="twice"):
        next(offers)


def test_a_checkpoint_directory_is_a_mapping_that_reads_late(tmp_path):
    state = small_state()
    write_checkpoint(tmp_path / "real", state, shards=3)
    (tmp_path / "hub").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "hub" / path.name).symlink_to(path)
    with CheckpointTensors(tmp_path / "hub") as tensors:
        assert (len(tensors), set(tensors)) == (len(state), set(state))
        for name, tensor in tensors.items():
            expected = state[name].dtype, state[name].shape, state[name].data.tobytes()
            assert described(tensor) == expected
        opened = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == opened - 3
    with pytest.raises(VersionMissingError):
        CheckpointTensors(tmp_path)


def test_torch_is_not_imported_for_numpy(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from gpusync.publish import Publisher\n"
        f"Publisher({str(tmp_path)!r}).publish_full({{'a': np.zeros(3, np.float32)}})\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
