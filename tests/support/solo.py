"""One rank that serves a tiny model and follows a stream, with everything that a test wants to do to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpusync.sync import WeightSync
from support.checkpoints import read_state, write_checkpoint
from support.engines import as_state, as_tensors, derived, step
from support.models import ModelConfig, TinyModel, fresh_load, make_state
from support.models_apply import assert_same
from support.models_layers import Ranks
from support.slime import publish_delta

CONFIG = ModelConfig()


class Engine:
    """A model that serves version 0, and a stream beside it."""

    def __init__(self, root: Path, config: ModelConfig = CONFIG) -> None:
        self.config, self.root = config, root
        self.states = [make_state(config)]
        write_checkpoint(root / "base", as_state(self.states[0]))
        (root / "stream").mkdir()
        self.start()

    def start(self, version: int = 0, **options: Any) -> None:
        self.model = fresh_load(self.config, Ranks(), self.states[version])
        self.attach(**options)

    def attach(self, **options: Any) -> None:
        twin = TinyModel(self.config, Ranks())
        self.sync = WeightSync(
            self.model,
            load_weights=twin.load_weights,
            twin=twin,
            reload=self.reload,
            base_dir=self.root / "base",
            local_checkpoint_dir=self.root / "local",
            source_dir=self.root / "stream",
            **{"derived": derived(), "timeout": 60, "workers": 2, "in_process": True, **options},
        )

    def reload(self, directory: Path) -> None:
        self.reloads = getattr(self, "reloads", 0) + 1
        with torch.no_grad():
            self.model.load_weights(as_tensors(read_state(directory), self.states[0]).items())
            self.model.post_load()

    def publish(self, *, encoding: str = "xor", **options: object) -> int:
        self.states.append(step(self.states[-1], len(self.states)))
        version = len(self.states) - 1
        old, new = as_state(self.states[-2]), as_state(self.states[-1])
        publish_delta(self.root / "stream", version, old, new, encoding=encoding, **options)  # type: ignore[arg-type]
        return version

    def assert_live(self, version: int) -> None:
        assert_same(self.model, fresh_load(self.config, Ranks(), self.states[version]))
        assert self.sync.version == version
