"""A tiny engine over several gloo ranks: each serves its slices of the model of `models.py`, and follows a stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpusync import Publisher
from gpusync.layout import DerivedRegistry
from gpusync.sync import WeightSync
from support.checkpoints import State, Tensor, read_state, write_checkpoint
from support.models import ModelConfig, TinyModel, fresh_load, make_state, specs_of, tensor_bytes
from support.models_apply import assert_same
from support.models_layers import Mla, Ranks
from support.slime import publish_delta, publish_full

Tensors = dict[str, torch.Tensor]


def derived() -> DerivedRegistry:
    registry = DerivedRegistry()
    registry.register(Mla, lambda module: module.derive())
    return registry


def as_state(tensors: Mapping[str, torch.Tensor]) -> State:
    return {
        name: Tensor(spec.dtype, spec.shape, tensor_bytes(tensors[name])) for name, spec in specs_of(tensors).items()
    }


def as_tensors(state: State, like: Mapping[str, torch.Tensor]) -> Tensors:
    return {
        name: torch.tensor(list(each.data), dtype=torch.uint8).view(like[name].dtype).reshape(like[name].shape)
        for name, each in state.items()
    }


def step(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """The next state: a few elements of every tensor move by units in the last place."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor).view(f"u{tensor.element_size()}")
        if data.size:
            at = np.unique(rng.integers(0, data.size, max(1, data.size // 20)))
            data[at] ^= rng.integers(1, 4, at.size).astype(data.dtype)
        after[name] = torch.from_numpy(data.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)
    return after


def publish_history(root: Path, config: ModelConfig, versions: int) -> list[Tensors]:
    """A base and `versions` deltas under `root`; the states of 0..versions, the same wherever they are made."""
    states = history(config, versions)
    write_checkpoint(root / "base", as_state(states[0]))
    (root / "stream").mkdir()
    for version in range(1, versions + 1):
        old, new = as_state(states[version - 1]), as_state(states[version])
        publish_delta(root / "stream", version, old, new, encoding=("xor", "overwrite")[version % 2], shards=2)
    return states


def publish_slime_stream(root: Path, config: ModelConfig, versions: int) -> None:
    """As slime writes it: both encodings, every checksum, and every fifth version a full one."""
    states = history(config, versions)
    write_checkpoint(root / "base", as_state(states[0]))
    (root / "stream").mkdir()
    for version in range(1, versions + 1):
        if version % 5 == 0:
            publish_full(root / "stream", version, as_state(states[version]))
            continue
        publish_delta(
            root / "stream",
            version,
            as_state(states[version - 1]),
            as_state(states[version]),
            encoding=("xor", "overwrite")[version % 2],
            checksum=("xxh3-128", "blake3", "adler32")[version % 3],
            shards=1 + version % 3,
        )


def publish_our_stream(root: Path, config: ModelConfig, versions: int) -> None:
    """As our publisher writes it: encodings by turns, and every fifth version a full one."""
    states = history(config, versions)
    write_checkpoint(root / "base", as_state(states[0]))
    for version in range(1, versions + 1):
        encoding = ("gpusync", "xor", "gpusync", "overwrite")[version % 4]
        options = {"resume": True} if version > 1 else {}
        publisher = Publisher(root / "stream", base_dir=root / "base", encoding=encoding, full_every=5, **options)
        publisher.publish(states[version].items())


def history(config: ModelConfig, versions: int) -> list[Tensors]:
    states = [make_state(config)]
    for version in range(1, versions + 1):
        after = step(states[-1], version)
        if config.tied:
            after["lm_head.weight"] = after["embed.weight"]
        states.append(after)
    return states


class EngineRank:
    """One rank. `host` names the local directory: ranks with the same one are on one host. `device`: where its params
    are; its twin is on the CPU in any case.
    """

    def __init__(
        self,
        root: Path,
        config: ModelConfig,
        *,
        host: str = "local",
        version: int = 0,
        versions: int = 4,
        device: str = "cpu",
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        self.config, self.root, self.host, self.reloads = config, root, host, 0
        self.states = history(config, versions)
        self.ranks = ranks or Ranks(dist.get_rank(), dist.get_world_size())
        with torch.device(device):
            self.model = fresh_load(config, self.ranks, self.states[version])
        twin = TinyModel(config, self.ranks)
        self.sync = WeightSync(
            self.model,
            load_weights=twin.load_weights,
            twin=twin,
            reload=self.reload,
            base_dir=root / "base",
            source_dir=root / "stream",
            **{
                "local_checkpoint_dir": root / host,
                "group": dist.group.WORLD if ranks is None else None,
                "derived": derived(),
                "timeout": 60,
                "workers": 1,
                **options,
            },
        )

    def reload(self, directory: Path) -> None:
        self.reloads += 1
        with torch.no_grad():
            self.model.load_weights(as_tensors(read_state(directory), self.states[0]).items())
            self.model.post_load()

    def assert_live(self, version: int) -> None:
        assert_same(self.model, fresh_load(self.config, self.ranks, self.states[version]))
        assert self.sync.version == version

    def assert_bytes(self, version: int) -> None:
        """What is live, whatever is said of it."""
        assert_same(self.model, fresh_load(self.config, self.ranks, self.states[version]))

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.model.named_parameters()}
