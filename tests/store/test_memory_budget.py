"""What a prepare and a commit take beside the params: the staging budget, and memory in proportion to the change."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpusync.codec import MemoryPayload, encode_gf01, encode_gs01, encode_overwrite, encode_xor, open_delta
from gpusync.digest import DigestReport, Shards, Traffic, digest_of
from gpusync.errors import Where
from gpusync.layout import attach, named_tensors, trace
from gpusync.store.casts import CastStore
from gpusync.store.compact import WINDOW_BYTES, CompactWriter, StepFiles
from gpusync.store.memory import HostMemory
from gpusync.store.rank import RankStore
from gpusync.store.tensor_update import TensorUpdate
from gpusync.stream import BytesSource, TensorSpec

ROWS, COLUMNS, TENSORS = 1024, 1024, 6
NBYTES = 2 * ROWS * COLUMNS
STAGING = 2 << 20
# Rows of tables, objects, and what alignment adds to every allocation.
SMALL = 256 << 10


class CountingMemory(HostMemory):
    """Copies what it is sent, as a device has to."""

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._held(np.array(array, order="C", subok=False))


class Model(torch.nn.Module):
    """Tensors of 2 MiB; the rank holds half of each, rows of some and columns of others."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(TENSORS):
            shape = (ROWS // 2, COLUMNS) if number % 2 else (ROWS, COLUMNS // 2)
            self.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            part = tensor[: ROWS // 2] if int(name[1:]) % 2 else tensor[:, : COLUMNS // 2]
            self.get_parameter(name).data.copy_(part)


class Case:
    """A rank, its old and new state, and an update in one form. Its group: it digests what it holds twice over."""

    def __init__(self, root: Path, form: str, share: float) -> None:
        rng = np.random.default_rng(0)
        self.old = {f"w{n}": rng.integers(0, 1 << 16, (ROWS, COLUMNS), dtype=np.uint16) for n in range(TENSORS)}
        self.new = {name: words.copy() for name, words in self.old.items()}
        self.changed = 0
        for words in self.new.values():
            at = rng.permutation(words.size)[: int(share * words.size)]
            words.reshape(-1)[at] ^= 1
            self.changed += at.size
        self.memory = CountingMemory()
        model = Model()
        model.load_weights((name, torch.from_numpy(words).view(torch.bfloat16)) for name, words in self.old.items())
        specs = {name: TensorSpec(name=name, dtype="BF16", shape=(ROWS, COLUMNS), nbytes=NBYTES) for name in self.old}
        self.params = named_tensors(model)
        layout, _ = attach(trace(model, model.load_weights, specs), self.params)
        casts = CastStore(layout, self.params, memory=self.memory)
        self.store = RankStore(
            layout, self.params, memory=self.memory, casts=casts, digest=self._digest, staging_bytes=STAGING
        )
        self.updates, self.compact_bytes = self._updates(root / "compact", form)
        self.files = StepFiles(root / "compact")

    @property
    def reader(self) -> Any:
        """The old version, as the mirror has it."""
        return lambda name: BytesSource(self.old[name].view(np.uint8).reshape(-1))

    def _digest(self, shards: Shards) -> DigestReport:
        """Asks for every byte; what the other rank holds is taken on trust."""
        source = shards.source()
        asked = sum(int(window.rows["row_bytes"] @ window.rows["rows"]) for window in source.windows(source.layers[0]))
        assert asked == len(shards.names) * NBYTES // 2
        return DigestReport(digests=tuple(self.updates[name].checksum for name in shards.names), traffic=Traffic())

    def _updates(self, path: Path, form: str) -> tuple[dict[str, TensorUpdate], int]:
        writer = CompactWriter(path)
        updates = {}
        for name in self.old:
            old, new = (state[name].view(np.uint8).reshape(-1) for state in (self.old, self.new))
            payload = MemoryPayload(_encode(form, old, new))
            decoder = open_delta(
                payload,
                encoding="gpusync" if form[0] == "g" else form,
                nbytes=NBYTES,
                element_bytes=2,
                float_order=True,
            )
            updates[name] = TensorUpdate(
                nbytes=NBYTES,
                steps=(writer.add(decoder, nbytes=NBYTES, element_bytes=2),),
                algorithm="xxh3-128",
                checksum=digest_of("xxh3-128", new),
                where=Where(tensor=name),
            )
        writer.close()
        return updates, writer.nbytes

    def live(self) -> dict[str, bytes]:
        return {name: bytes(tensor.detach().view(torch.uint8).numpy()) for name, tensor in self.params.items()}

    def slices(self, state: dict[str, npt.NDArray[np.uint16]]) -> dict[str, bytes]:
        model = Model()
        model.load_weights((name, torch.from_numpy(words).view(torch.bfloat16)) for name, words in state.items())
        return {name: bytes(tensor.detach().view(torch.uint8).numpy()) for name, tensor in named_tensors(model).items()}


def _encode(form: str, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> bytes:
    if form == "gs01":
        return encode_gs01(old, new, element_bytes=2, float_order=True) or b""
    if form == "gf01":
        return encode_gf01(old, new, transform=0, element_bytes=2, float_order=True) or b""
    return (encode_xor if form == "xor" else encode_overwrite)(old, new) or b""


@pytest.mark.parametrize("form", ["xor", "overwrite", "gs01"])
def test_beside_the_params_there_is_the_staging_budget_and_what_changed(tmp_path: Path, form: str) -> None:
    case = Case(tmp_path, form, 0.01)
    case.memory.reset_peak()
    prepared = case.store.prepare(case.updates, case.files, base=case)
    # The rank holds half of what changed. A GS01 blob is kept whole, and is far smaller than that.
    most = STAGING + (2 + 6) * case.changed // 2 + SMALL
    assert case.memory.peak_bytes <= most
    assert case.memory.live_bytes <= (2 + 6) * case.changed // 2 + SMALL
    case.store.commit(prepared)
    assert case.memory.peak_bytes <= most
    assert case.live() == case.slices(case.new)
    case.store.roll_back(prepared)
    assert case.live() == case.slices(case.old)
    del prepared
    assert case.memory.live_bytes == 0


@pytest.mark.parametrize("form", ["xor", "gf01"])
def test_a_dense_change_is_applied_in_bounded_steps_and_says_so(tmp_path: Path, form: str) -> None:
    case = Case(tmp_path, form, 0.9)
    case.memory.reset_peak()
    prepared = case.store.prepare(case.updates, case.files, base=case)
    assert prepared.streamed_bytes > STAGING
    case.store.commit(prepared)
    assert case.memory.peak_bytes <= 2 * STAGING
    assert case.live() == case.slices(case.new)
    case.store.roll_back(prepared)
    assert case.live() == case.slices(case.old)


def test_the_host_takes_twice_the_compact_form_and_the_budget(tmp_path: Path) -> None:
    """Decoding included: what it holds at once is a window of the tensor."""
    tracemalloc.start()
    try:
        case = Case(tmp_path, "xor", 0.01)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        path = tmp_path / "again"
        path.mkdir()
        updates, compact_bytes = case._updates(path / "compact", "xor")
        prepared = case.store.prepare(updates, StepFiles(path / "compact"), base=case)
        case.store.commit(prepared)
        peak = tracemalloc.get_traced_memory()[1] - kept
    finally:
        tracemalloc.stop()
    # The encoder of this test runs as well; a window of the decoder is not larger than a tensor here.
    assert peak <= 2 * compact_bytes + STAGING + WINDOW_BYTES + 2 * NBYTES
