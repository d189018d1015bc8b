"""One version changes a few elements of tensors whose elements have different widths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

import gpusync
from gpusync.sync import WeightSync
from support.checkpoints import State, changed, small_state, write_checkpoint

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


class Held(torch.nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        self.names = {name: f"t{number}" for number, name in enumerate(state)}
        for name, tensor in state.items():
            held = torch.empty(tensor.shape, dtype=DTYPES.get(tensor.dtype, torch.int64))
            if held.numel():
                held.view(-1).view(torch.uint8).copy_(torch.from_numpy(tensor.data.copy()))
            self.register_buffer(self.names[name], held)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_buffer(self.names[name]).copy_(tensor)

    def bytes_of(self, name: str) -> bytes:
        return self.get_buffer(self.names[name]).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_of_a_version_of_mixed_widths_is_committed_in_place(tmp_path: Path) -> None:
    state = small_state()
    write_checkpoint(tmp_path / "base", state)
    model = Held(state)
    sync = WeightSync(
        model,
        load_weights=model.load_weights,
        base_dir=tmp_path / "base",
        local_checkpoint_dir=tmp_path / "local",
        source_dir=tmp_path / "stream",
        timeout=60,
    )
    publisher = gpusync.Publisher(tmp_path / "stream", base_dir=tmp_path / "base", encoding="xor")
    after = changed(state, 1, share=0.002)
    publisher.publish(write_checkpoint(tmp_path / "trained", after))
    assert sync.pull(1).commit_path == "in place"
    assert {name: model.bytes_of(name) for name in after} == {n: t.data.tobytes() for n, t in after.items()}
    sync.close()
