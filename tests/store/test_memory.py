"""One contract for memory on the host, on a CUDA device, and on one played by the CPU; what is chosen, and why."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusync.errors import BackendUnavailableError, LayoutError
from gpusync.store.choose_memory import choose_memory
from gpusync.store.device_memory import DeviceMemory
from gpusync.store.memory import Accounts, HostMemory, Memory, is_out_of_memory
from gpusync_kernels import SegmentTable, bind_moves, copy_segments
from support import emulated_cuda

PINNED = 4096  # so that a few KiB go through it in several turns
# nothing, less than a vector, half of the pinned memory and its neighbours, many turns and an odd end
SIZES = [0, 1, 63, PINNED // 2 - 1, PINNED // 2, PINNED // 2 + 1, 10 * PINNED + 3]


@pytest.fixture(params=["host", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Memory:
    if request.param == "host":
        return HostMemory()
    if request.param == "emulated":
        emulated_cuda.install(monkeypatch)
        return DeviceMemory("cpu", pinned_bytes=PINNED)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return DeviceMemory("cuda", pinned_bytes=PINNED)


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_sent_comes_back(memory: Memory, nbytes: int) -> None:
    sent = random_bytes(nbytes)
    there = memory.upload(sent)
    wanted = sent.copy()
    assert np.array_equal(memory.download(there), wanted)
    assert (there.nbytes, memory.live_bytes >= nbytes) == (nbytes, True)


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8", "<i4"])
def test_words_keep_their_width_and_bits(memory: Memory, dtype: str) -> None:
    sent = random_bytes(8 * 1000).view(dtype)
    there = memory.upload(sent)
    assert there.dtype.itemsize == sent.itemsize
    assert memory.zeros_like(there).dtype.itemsize == sent.itemsize
    assert np.array_equal(memory.download(there).view(dtype), sent)
    assert memory.upload(sent[:0]).nbytes == 0


def test_what_does_not_lie_together_is_sent(memory: Memory, tmp_path: Path) -> None:
    data = random_bytes(6000)
    data.tofile(tmp_path / "bytes")
    mapped = np.memmap(tmp_path / "bytes", np.uint8, "r")
    assert np.array_equal(memory.download(memory.upload(mapped)), data)
    assert np.array_equal(memory.download(memory.upload(data[::3])), data[::3])


def test_many_are_sent_together(memory: Memory) -> None:
    sent = [random_bytes(size) for size in [*SIZES, 17, 2, 5000]] + [random_bytes(80).view("<u4")]
    there = memory.upload_all(sent)
    for one, other in zip(sent, there, strict=True):
        assert np.array_equal(memory.download(other).view(one.dtype), one)
        assert other.dtype.itemsize == one.itemsize
    assert memory.upload_all([]) == []
    assert memory.upload_all([random_bytes(0)])[0].nbytes == 0


def test_empty_is_writable_and_zeros_are_zero(memory: Memory) -> None:
    for nbytes in SIZES:
        poisoned = memory.empty(nbytes)
        poisoned[...] = 0xA5
        assert (memory.download(poisoned) == 0xA5).all()
        del poisoned
        assert not memory.download(memory.zeros(nbytes)).any()
    assert not memory.download(memory.zeros_like(memory.upload(random_bytes(100)))).any()


def test_buffers_lie_where_params_do(memory: Memory) -> None:
    """Kernels copy between the two."""
    param = torch.from_numpy(random_bytes(100)).to(getattr(memory, "device", "cpu"))
    scratch = memory.empty(100)
    copy_segments(bind_moves(SegmentTable.flat(nbytes=100), dst=[scratch], src=[param]))
    assert np.array_equal(memory.download(scratch), random_bytes(100))
    assert memory.download(memory.zeros_like(param)).tolist() == [0] * 100


def test_held_and_most_held(memory: Memory) -> None:
    assert (memory.live_bytes, memory.peak_bytes) == (0, 0)
    one, other = memory.empty(1000), memory.zeros(500)
    assert (memory.live_bytes, memory.peak_bytes) == (1500, 1500)
    del one
    gc.collect()
    assert (memory.live_bytes, memory.peak_bytes) == (500, 1500)
    third = memory.zeros_like(other)
    assert (memory.live_bytes, memory.peak_bytes) == (1000, 1500)
    del other, third
    assert (memory.live_bytes, memory.peak_bytes) == (0, 1500)


@pytest.mark.parametrize(
    "view", [lambda b: b[100:], lambda b: b[16:].reshape(-1, 8), lambda b: b[3:][5:]], ids=["slice", "shape", "slices"]
)
def test_a_view_holds_the_whole(memory: Memory, view: Callable[[Any], Any]) -> None:
    whole = memory.empty(1000)
    part = view(whole)
    del whole
    gc.collect()
    assert memory.live_bytes == 1000
    del part
    assert memory.live_bytes == 0


def test_what_was_sent_counts_until_it_goes(memory: Memory) -> None:
    there = memory.upload_all([random_bytes(4096), random_bytes(1024)])
    assert memory.live_bytes == 5120
    del there
    assert memory.live_bytes == 0


def test_work_beside_serving_is_done_when_it_ends(memory: Memory) -> None:
    with memory.beside():
        there = memory.upload(random_bytes(10 * PINNED))
        found = memory.zeros(10 * PINNED)
        copy_segments(bind_moves(SegmentTable.flat(nbytes=10 * PINNED), dst=[found], src=[there]))
    memory.synchronise()
    assert np.array_equal(memory.download(found), random_bytes(10 * PINNED))
    with pytest.raises(KeyError), memory.beside():
        raise KeyError


def test_a_device_works_beside_serving_on_one_stream_of_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_cuda.install(monkeypatch)
    entered: list[emulated_cuda.Stream] = []

    def enter(stream: emulated_cuda.Stream) -> nullcontext[None]:
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", enter)
    memory = DeviceMemory("cpu")
    for _ in range(2):
        with memory.beside():
            pass
    assert entered[0] is entered[1]
    assert entered[0].priority == 0  # more is asked for by lower numbers


def test_pinned_memory_is_bounded_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_cuda.install(monkeypatch)
    from gpusync.codec.device import staging

    pinned: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        pinned.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staging, "pinned", counted)
    memory = DeviceMemory("cpu", pinned_bytes=PINNED)
    assert pinned == []
    for nbytes in SIZES:
        memory.upload(random_bytes(nbytes))
    assert sum(pinned) == PINNED


def test_owners_that_go_while_others_are_counted() -> None:
    accounts = Accounts()
    owners = [np.empty(1, np.uint8) for _ in range(10)]
    for owner in owners:
        accounts.hold(owner, 7)
    del owner, owners[:4]
    last = np.empty(1, np.uint8)
    accounts.hold(last, 1)
    assert (accounts.live_bytes, accounts.peak_bytes) == (43, 70)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_errors_that_mean_no_memory(error: Exception, told: bool) -> None:
    assert is_out_of_memory(error) is told


def test_real_errors_of_allocators_are_told_apart() -> None:
    with pytest.raises(MemoryError) as numpy_error:
        HostMemory().empty(1 << 60)
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(numpy_error.value)
    assert is_out_of_memory(torch_error.value)


class TestChoice:
    cpu = torch.zeros(1)
    meta = torch.zeros(1, device="meta")

    @pytest.mark.parametrize("want", ["auto", "cpu"])
    def test_params_on_the_cpu(self, want: Any) -> None:
        for params in ({"a": self.cpu, "b": self.cpu}, {}):
            memory, reason = choose_memory(params, want)
            assert isinstance(memory, HostMemory)
            assert reason == "params are on the CPU"

    def test_a_gpu_that_params_are_not_on_is_refused(self) -> None:
        with pytest.raises(BackendUnavailableError) as caught:
            choose_memory({"a": self.cpu}, "gpu")
        assert (caught.value.expected, caught.value.found) == ("params on a CUDA device", "params on the CPU")

    def test_params_in_two_places_are_named(self) -> None:
        with pytest.raises(LayoutError, match="`b` and `c` lie on different devices") as caught:
            choose_memory({"b": self.cpu, "a": self.cpu, "c": self.meta})
        assert (caught.value.expected, str(caught.value.found)) == ("`c` on cpu", "meta")

    def test_a_device_without_kernels_is_refused(self) -> None:
        with pytest.raises(BackendUnavailableError, match="params on meta"):
            choose_memory({"a": self.meta})

    def test_an_unknown_wish_is_refused(self) -> None:
        with pytest.raises(BackendUnavailableError, match="unknown place"):
            choose_memory({}, "cuda")  # type: ignore[arg-type]

    def test_a_cuda_device_needs_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = sys.modules["gpusync.store.choose_memory"]
        monkeypatch.setattr(module, "_device_of", lambda params: torch.device("cuda:1"))
        monkeypatch.setattr(module, "find_spec", lambda name: name)
        memory, reason = choose_memory({})
        assert (type(memory), str(memory.device), reason) == (DeviceMemory, "cuda:1", "params are on cuda:1")
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(BackendUnavailableError, match="weights on cuda:1 cannot be updated; expected triton"):
            choose_memory({})

    @pytest.mark.gpu
    def test_params_on_a_cuda_device(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        params = {"a": self.cpu.cuda(), "b": self.cpu.cuda()}
        for want in ("auto", "gpu"):
            memory, reason = choose_memory(params, want)
            assert isinstance(memory, DeviceMemory)
            assert reason == f"params are on cuda:{torch.cuda.current_device()}"
        with pytest.raises(BackendUnavailableError, match="where they are"):
            choose_memory(params, "cpu")
