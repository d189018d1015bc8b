"""What an engine rearranges when it loads, and a reload that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpusync.engines.module import make_loader
from gpusync.engines.vllm.packing import Packing
from gpusync.layout import PlacementClass, named_tensors, trace
from gpusync.stream import read_checkpoint
from support.checkpoints import State, Tensor, write_checkpoint


def _state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        name: Tensor("F32", (4, 6), rng.normal(size=24).astype("<f4").view(np.uint8))
        for name in ("0.weight", "1.weight")
    }


def _load(model: torch.nn.Module, state: State, *, packs: bool) -> None:
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            values = torch.from_numpy(state[name].data.view("<f4").copy())
            is_packed = packs and name == "1.weight"
            tensor.copy_((values.flip(0) if is_packed else values).reshape(4, 6))


def _scene(root: Path, *, packs: bool) -> tuple[torch.nn.Module, Packing]:
    base = write_checkpoint(root / "base", _state(0), files={"config.json": "{}"})
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(6, 4, bias=False))
    tensors = read_checkpoint(base).tensors
    layout = trace(model, make_loader(model, tensors), tensors)
    _load(model, _state(0), packs=packs)
    return model, Packing(layout, model, base)


def _opaque(packing: Packing) -> list[str]:
    return [name for name, each in packing.layout.placements.items() if each.kind is PlacementClass.OPAQUE]


def test_what_the_load_has_rearranged_is_opaque_for_good(tmp_path: Path) -> None:
    assert _opaque(_scene(tmp_path / "packed", packs=True)[1]) == ["1.weight"]
    assert _opaque(_scene(tmp_path / "plain", packs=False)[1]) == []


def test_a_reload_that_rearranges_as_the_load_did_is_complete(tmp_path: Path) -> None:
    model, packing = _scene(tmp_path, packs=True)
    after = write_checkpoint(tmp_path / "after", _state(1), files={"config.json": "{}"})
    _load(model, _state(1), packs=True)
    assert packing.find_omission(after) is None


def test_a_reload_that_leaves_it_out_is_found_out(tmp_path: Path) -> None:
    model, packing = _scene(tmp_path, packs=True)
    after = write_checkpoint(tmp_path / "after", _state(1), files={"config.json": "{}"})
    _load(model, _state(1), packs=False)
    assert "`1.weight`" in str(packing.find_omission(after))


def test_where_nothing_is_rearranged_nothing_can_be_left_out(tmp_path: Path) -> None:
    model, packing = _scene(tmp_path, packs=False)
    after = write_checkpoint(tmp_path / "after", _state(1), files={"config.json": "{}"})
    _load(model, _state(1), packs=False)
    assert packing.find_omission(after) is None
