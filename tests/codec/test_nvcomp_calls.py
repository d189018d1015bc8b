"""Every call of nvCOMP that is made exists in the module that is installed, with the parameters it is given.

Nothing of nvCOMP runs without a GPU, but it imports, and its functions' signatures stand in their docstrings.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpusync.codec.device.nvcomp import REQUIRED, missing_calls
from support import emulated_cuda

nvcomp = pytest.importorskip("nvidia.nvcomp", reason="nvidia-nvcomp is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")


def overloads(function: Any) -> list[dict[str, str]]:
    """Parameter to type, of each signature in a docstring: `1. name(a: int, b: list[int] = 0) -> X`."""
    found = []
    for line in function.__doc__.splitlines():
        signature = re.match(rf"\s*(?:\d+\. )?{function.__name__}\((.*)\) -> ", line)
        if signature:
            parameters = re.findall(r"(\w+): ([\w.\[\]]+)", signature[1])
            found.append({name: kind.rsplit(".", 1)[-1] for name, kind in parameters})
    return found


def options(function: Any) -> set[str]:
    """Of a function that takes keywords only: the names that its docstring explains."""
    return set(re.findall(r"^\s+(\w+): ", function.__doc__, re.MULTILINE))


def test_nothing_that_is_used_is_missing() -> None:
    assert missing_calls(nvcomp) == []
    for call in REQUIRED:
        assert call in ("as_arrays", "Codec.__init__", "Codec.decode", "BitstreamKind.RAW", "set_device_allocator")


def test_one_buffer_is_carved_into_a_batch() -> None:
    wanted = {"buffer": "object", "offsets": "list[int]", "sizes": "list[int]", "cuda_stream": "int"}
    (carving,) = (each for each in overloads(nvcomp.as_arrays) if "offsets" in each)
    assert list(carving.items()) == list(wanted.items())  # the first three are given by their position


def test_a_batch_is_decoded_into_a_batch() -> None:
    (batch,) = (each for each in overloads(nvcomp.Codec.decode) if each.get("srcs") == "BatchArray")
    assert list(batch)[:2] == ["self", "srcs"]
    assert batch["out"] == "object"
    assert "out: An optional nvcomp.BatchArray" in nvcomp.Codec.decode.__doc__


def test_a_codec_of_raw_zstd_on_a_stream_can_be_asked_for() -> None:
    assert {"algorithm", "device_id", "cuda_stream", "bitstream_kind"} <= options(nvcomp.Codec.__init__)
    assert nvcomp.BitstreamKind.RAW is not None


def test_scratch_comes_from_an_allocator_of_ours() -> None:
    assert overloads(nvcomp.set_device_allocator) == [{"allocator": "object"}]
    told = nvcomp.set_device_allocator.__doc__
    assert "def my_allocator(nbytes: int, stream: nvcomp.Stream) -> PtrProtocol" in told
    assert "`ptr` attribute of integral type" in told
    assert isinstance(nvcomp.CudaStream.ptr, property)
    assert isinstance(nvcomp.CudaStream.device, property)


def test_without_a_device_calls_raise_what_the_choice_expects() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError):
        nvcomp.Codec(algorithm="Zstd", bitstream_kind=nvcomp.BitstreamKind.RAW)


def test_what_is_emulated_elsewhere_takes_what_is_real() -> None:
    emulated = emulated_cuda.Nvcomp()
    assert missing_calls(emulated) == []
    code = emulated_cuda.Nvcomp.as_arrays.__code__
    real = next(each for each in overloads(nvcomp.as_arrays) if "offsets" in each)
    assert list(code.co_varnames[1 : code.co_argcount]) == list(real)
