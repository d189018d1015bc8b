"""What a training model publishes: alone, and sharded over two ranks with FSDP 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gpusync
from gpusync.errors import PublishError
from gpusync.trainers import named_tensors
from support.checkpoints import Tensor, read_state, write_checkpoint
from support.ranks import run_ranks


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    # 5 rows over two ranks: one has more than the other
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Sequential(torch.nn.Linear(5, 4, bias=False)))


def words(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes() for name, t in tensors.items()}


def write_base(directory: Path) -> None:
    state = make_model().state_dict()
    data = {name: (tuple(state[name].shape), raw) for name, raw in words(state).items()}
    numpy_of = {name: torch.frombuffer(bytearray(raw), dtype=torch.uint8).numpy() for name, (_, raw) in data.items()}
    write_checkpoint(directory, {name: Tensor("BF16", shape, numpy_of[name]) for name, (shape, _) in data.items()})


def test_a_plain_module_is_given_whole_under_its_own_names() -> None:
    model = make_model()
    found = dict(named_tensors(model))
    assert list(found) == ["0.weight", "0.bias", "1.0.weight"]
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_floating_point_is_converted_and_nothing_else() -> None:
    model = make_model()
    model.register_buffer("steps", torch.tensor([3]))
    found = dict(named_tensors(model, dtype=torch.bfloat16))
    assert found["0.weight"].dtype == torch.bfloat16
    assert torch.equal(found["0.weight"], model.state_dict()["0.weight"].to(torch.bfloat16))
    assert found["steps"].dtype == torch.int64


def test_names_are_those_of_the_checkpoint() -> None:
    compiled = torch.nn.Module()
    compiled.add_module("_orig_mod", make_model())
    renamed = named_tensors(compiled, rename=lambda name: None if name.endswith("bias") else f"model.{name}")
    assert [name for name, _ in renamed] == ["model.0.weight", "model.1.0.weight"]


def test_flat_parameters_are_refused_by_name() -> None:
    module = torch.nn.Module()
    module.register_parameter("_flat_param", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(PublishError, match="_flat_param"):
        list(named_tensors(module))


def test_what_is_published_from_it_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    publisher = gpusync.Publisher(tmp_path / "stream", base_dir=tmp_path / "base")
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    report = publisher.publish(named_tensors(model, dtype=torch.bfloat16))
    assert report.tensors_changed == 3
    assert pulled(tmp_path) == words(model.state_dict())


def test_sharded_over_two_ranks_each_tensor_is_published_once_and_whole(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(2, tmp_path, train_and_publish)
    shares = [set((tmp_path / f"names-{rank}.txt").read_text().split()) for rank in range(2)]
    assert shares == [{"0.weight", "1.0.weight"}, {"0.bias"}]
    assert pulled(tmp_path) == words(torch.load(tmp_path / "expected.pt"))


def train_and_publish(root: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    model = make_model()
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3, 6)).square().mean().backward()
    optimizer.step()
    group = dist.group.WORLD
    mine = [name for name, _ in named_tensors(model, group=group)]
    (root / f"names-{rank}.txt").write_text("\n".join(mine))
    publisher = gpusync.Publisher(root / "stream", base_dir=root / "base", group=group)
    publisher.publish(named_tensors(model, group=group, dtype=torch.bfloat16))
    expected = dict(named_tensors(model))
    if rank == 0:
        torch.save(expected, root / "expected.pt")


def pulled(root: Path) -> dict[str, bytes]:
    gpusync.pull(
        local_checkpoint_dir=root / "local", base_dir=root / "base", source_dir=root / "stream", target_version=1
    )
    return {name: tensor.data.tobytes() for name, tensor in read_state(root / "local").items()}
