"""One contract for every decoder of frames: libzstd's, nvCOMP's on a GPU, and nvCOMP's with its calls emulated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import zstandard

from gpusync.codec import FULL, MemoryPayload, encode_gf01
from gpusync.codec.frame_decoder import HostFrameDecoder, choose_frame_decoder, choose_payload_decoder
from gpusync.codec.gf01_layout import read_layout
from gpusync.codec.stored_frames import StoredFrame, check_stored, gf01_frames
from gpusync.errors import BackendUnavailableError, LayoutError, PayloadError, Where
from support import emulated_cuda

torch = pytest.importorskip("torch", reason="torch is not installed")

FRAME = 64 << 10
# nothing, less than an alignment, no multiple of one, a frame and its neighbours, many frames, an odd end
SIZES = [0, 1, 63, FRAME - 1, FRAME, FRAME + 1, 20 * FRAME, 20 * FRAME + 7]
SCRATCH = 24 << 20  # the least there can be
LARGE = 14 << 20  # more than two batches of it
GPU_SCRATCH, GPU_LARGE = 64 << 20, 40 << 20  # room for what nvCOMP takes however little it decodes
POISON = 0xA5


@dataclass
class Case:
    decoder: Any
    nvcomp: Any = None
    scratch_bytes: int = SCRATCH
    large: int = LARGE

    def room(self, nbytes: int) -> Any:
        """A poisoned output."""
        if self.decoder.device is None:
            return np.full(nbytes, POISON, np.uint8)
        return torch.full((nbytes,), POISON, dtype=torch.uint8, device=self.decoder.device)

    def decode(self, frames: list[StoredFrame], nbytes: int) -> np.ndarray:
        out = self.room(nbytes)
        self.decoder.decode(iter(frames), out)
        return out if isinstance(out, np.ndarray) else out.cpu().numpy()


@pytest.fixture(params=["host", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    if request.param == "host":
        return Case(HostFrameDecoder())
    if request.param == "emulated":
        emulated = emulated_cuda.install(monkeypatch)
        from gpusync.codec.device.frames import NvcompFrameDecoder

        return Case(NvcompFrameDecoder("cpu", scratch_bytes=SCRATCH, pinned_bytes=1 << 20), emulated)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from gpusync.codec.device.nvcomp import scratch

    scratch.reset_peak()
    decoder, _ = choose_frame_decoder(torch.device("cuda"), "gpu", scratch_bytes=GPU_SCRATCH)
    return Case(decoder, scratch_bytes=GPU_SCRATCH, large=GPU_LARGE)


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    """Neither all the same nor noise: frames are compressed, to different sizes."""
    return np.random.default_rng(seed).integers(0, 1 + seed % 7 + 3, nbytes).astype(np.uint8)


def frames_of(data: np.ndarray, *, offset: int = 0, frame_bytes: int = FRAME, where: Where | None = None) -> list:
    payload = encode_gf01(None, data, transform=FULL, element_bytes=1, float_order=False, frame_bytes=frame_bytes)
    stored = MemoryPayload(payload)
    layout = read_layout(stored, nbytes=data.size, element_bytes=1)
    return list(gf01_frames(stored, layout, offset=offset, where=where or Where(tensor="w")))


def frame(stored: bytes, nbytes: int, offset: int = 0) -> StoredFrame:
    return StoredFrame(stored=memoryview(stored), nbytes=nbytes, offset=offset, where=Where(tensor="w", version=3))


def compressed(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_arrive_where_they_belong_and_nowhere_else(case: Case, nbytes: int) -> None:
    data = content(nbytes, nbytes)
    found = case.decode(frames_of(data, offset=32), 32 + nbytes + 50)
    assert np.array_equal(found[32 : 32 + nbytes], data)
    assert (found[:32] == POISON).all()
    assert (found[32 + nbytes :] == POISON).all()


@pytest.mark.parametrize("frame_bytes", [FRAME, 256 << 10, 1 << 20])
def test_more_than_a_batch_within_the_budget(case: Case, frame_bytes: int) -> None:
    data = content(case.large, 1)
    assert np.array_equal(case.decode(frames_of(data, frame_bytes=frame_bytes), data.size), data)
    assert 0 < case.decoder.peak_scratch_bytes <= case.scratch_bytes
    if case.nvcomp is not None:
        assert len(case.nvcomp.batches) > 2
        assert sum(case.nvcomp.batches) == data.size


def test_what_does_not_compress_stays_within_the_budget_too(case: Case) -> None:
    data = np.random.default_rng(3).integers(0, 256, case.large, dtype=np.uint8)
    assert np.array_equal(case.decode(frames_of(data), data.size), data)
    assert case.decoder.peak_scratch_bytes <= case.scratch_bytes


def test_many_tensors_in_one_call_in_any_order(case: Case) -> None:
    sizes = [1, FRAME + 5, 0, 3 * FRAME, 100, 63]
    places = [16 * 40_000 * number for number in range(len(sizes))]
    parts = [content(size, number) for number, size in enumerate(sizes)]
    frames = [each for data, at in zip(parts, places, strict=True) for each in frames_of(data, offset=at)]
    found = case.decode(frames[::-1], places[-1] + sizes[-1])
    for data, at in zip(parts, places, strict=True):
        assert np.array_equal(found[at : at + data.size], data)


def test_threads_decode_at_once(case: Case) -> None:
    found: dict[int, np.ndarray] = {}

    def decode(number: int) -> None:
        for _ in range(3):
            found[number] = case.decode(frames_of(content(5 * FRAME, number)), 5 * FRAME)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[number], content(5 * FRAME, number)) for number in range(3))


def damaged() -> Iterator[tuple[str, bytes, int, str]]:
    whole = compressed(bytes(1000))
    yield "cut", whole[:-1], 1000, "does not end where"
    yield "followed by a byte", whole + b"\0", 1000, "does not end where"
    yield "two frames", whole + whole, 1000, "does not end where"
    yield "larger", compressed(bytes(1001)), 1000, "another content size"
    yield "smaller", compressed(bytes(999)), 1000, "another content size"
    yield "no size", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), 1000, "no content size"
    yield "no frame", b"GF01" + bytes(20), 1000, "no zstd frame"
    yield "empty", b"", 1000, "no zstd frame"
    dictionary = zstandard.train_dictionary(2048, [bytes([n % 251] * 400) + n.to_bytes(2, "big") for n in range(400)])
    yield "dictionary", compressed(bytes(1000), dict_data=dictionary), 1000, "dictionary"


@pytest.mark.parametrize(("stored", "nbytes", "told"), [each[1:] for each in damaged()], ids=[e[0] for e in damaged()])
def test_what_is_not_one_frame_of_that_size_is_refused_by_its_headers(
    case: Case, stored: bytes, nbytes: int, told: str
) -> None:
    with pytest.raises(PayloadError, match=told) as caught:
        case.decode([frame(compressed(bytes(63)), 63), frame(stored, nbytes, 64)], 2000)
    assert (caught.value.tensor, caught.value.version) == ("w", 3)


@pytest.mark.parametrize("nbytes", [FRAME, 3 << 20])  # in one go; from chunks
def test_libzstd_notices_damage_inside_of_a_frame(nbytes: int) -> None:
    stored = bytearray(compressed(content(nbytes, 5).tobytes(), write_checksum=True))
    stored[len(stored) // 2] ^= 0x40
    with pytest.raises(PayloadError) as caught:
        Case(HostFrameDecoder()).decode([frame(bytes(stored), nbytes)], nbytes)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(("offset", "told"), [(-16, "leaves"), (992, "leaves"), (1024, "leaves"), (8, "not aligned")])
def test_a_frame_that_does_not_belong_into_the_output_is_refused(case: Case, offset: int, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        case.decode([frame(compressed(bytes(63)), 63, offset)], 1024)


def test_a_tensor_in_one_frame_is_decoded_by_the_host_and_refused_by_a_device(case: Case) -> None:
    data = content((1 << 20) + 1, 2)
    stored = [frame(compressed(data.tobytes()), data.size)]
    if case.decoder.device is None:
        assert np.array_equal(case.decode(stored, data.size), data)
        assert case.decoder.peak_scratch_bytes == 0
    else:
        with pytest.raises(LayoutError, match="too large for a GPU"):
            case.decode(stored, data.size)


def test_a_torch_tensor_on_the_host_is_an_output() -> None:
    out = torch.zeros(100, dtype=torch.uint8)
    HostFrameDecoder().decode(frames_of(content(100, 4)), out)
    assert np.array_equal(out.numpy(), content(100, 4))


def test_frames_are_cut_from_a_payload_of_several_reads() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    frames = frames_of(data, offset=16)
    assert [each.offset for each in frames] == [16 + number * FRAME for number in range(48)]
    for each in frames:
        check_stored(each)


class TestDeviceErrors:
    @pytest.fixture
    def case(self, monkeypatch: pytest.MonkeyPatch) -> Case:
        emulated = emulated_cuda.install(monkeypatch)
        from gpusync.codec.device.frames import NvcompFrameDecoder

        return Case(NvcompFrameDecoder("cpu", scratch_bytes=SCRATCH), emulated)

    def test_no_room_for_scratch_is_told_as_torch_told_it(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            case.decode(frames_of(content(100)), 100)

    def test_a_failure_of_nvcomp_is_an_error_of_ours(self, case: Case) -> None:
        case.nvcomp.refuse = True
        with pytest.raises(BackendUnavailableError, match="illegal memory access"):
            case.decode(frames_of(content(100)), 100)
        case.nvcomp.refuse = False
        assert np.array_equal(case.decode(frames_of(content(100)), 100), content(100))

    def test_an_output_that_is_not_plain_bytes_is_refused(self, case: Case) -> None:
        for out in (torch.empty(8, dtype=torch.int32), torch.empty(4, 4, dtype=torch.uint8), case.room(64)[1:]):
            with pytest.raises(LayoutError, match="cannot be decoded to"):
                case.decoder.decode([], out)

    def test_too_little_scratch_is_refused(self) -> None:
        from gpusync.codec.device.frames import NvcompFrameDecoder

        with pytest.raises(LayoutError, match="too little scratch"):
            NvcompFrameDecoder("cpu", scratch_bytes=SCRATCH - 1)


class TestChoice:
    def test_the_cpu_is_taken_when_asked_for_or_where_params_are(self) -> None:
        for device, want, told in ((None, "auto", "host memory"), ("cpu", "auto", "host memory"), (0, "cpu", "asked")):
            decoder, reason = choose_frame_decoder(device, want)
            assert decoder.device is None
            assert told in reason

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_a_gpu_that_params_are_not_on_is_refused(self, device: str | None) -> None:
        with pytest.raises(BackendUnavailableError, match="host memory"):
            choose_frame_decoder(device, "gpu")

    def test_without_a_device_auto_says_so_and_gpu_is_refused(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        decoder, reason = choose_frame_decoder("cuda:0")
        assert decoder.device is None
        assert "no CUDA device" in reason
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            choose_frame_decoder("cuda:0", "gpu")

    def test_what_nvcomp_lacks_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        emulated = emulated_cuda.install(monkeypatch)
        from gpusync.codec.device import nvcomp

        assert nvcomp.why_unavailable("cpu") is None
        monkeypatch.delattr(emulated_cuda.Nvcomp, "as_arrays")
        assert nvcomp.missing_calls(emulated) == ["as_arrays"]
        with pytest.raises(BackendUnavailableError, match=r"nvidia\.nvcomp emulated lacks as_arrays"):
            choose_frame_decoder("cuda:0", "gpu")

        def absent() -> None:
            raise ModuleNotFoundError("No module named 'nvidia'")

        monkeypatch.setattr(nvcomp, "_module", absent)
        assert "nvidia.nvcomp cannot be imported" in choose_frame_decoder("cuda:0")[1]

    def test_an_unknown_wish_is_refused(self) -> None:
        with pytest.raises(BackendUnavailableError, match="unknown frame decoder"):
            choose_frame_decoder(None, "nvcomp")  # type: ignore[arg-type]

    def test_single_frame_payloads_go_to_the_host_with_the_reason(self, case: Case) -> None:
        assert choose_payload_decoder("gpusync", case.decoder)[0] is case.decoder
        for encoding in ("xor", "overwrite"):
            decoder, reason = choose_payload_decoder(encoding, case.decoder)
            assert decoder.device is None
            assert ("one zstd frame" in reason) == (case.decoder.device is not None)
