"""sglang's side of a reload from disk: running it, and what it writes down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpusync.errors import GpusyncError


def load_runners(updater: Any, directory: Path, load_format: str) -> None:
    """The ordinary reload, of the target and of the drafts."""
    for role, runner in updater._select_runners("all"):
        success, message = runner.weight_updater.update_weights_from_disk(str(directory), load_format)
        if not success:
            raise GpusyncError(f"the engine's reload of its {role} model failed: {message}", path=directory)


def record_reload(updater: Any, request: Any, version: int) -> None:
    """Where the weights come from now, and which they are."""
    from sglang.srt.configs.load_config import LoadConfig

    for _, runner in updater._select_runners("all"):
        runner.model_config.model_path = request.model_path
        runner.update_model_fields(
            runner.model,
            model_path=request.model_path,
            load_format=request.load_format,
            load_config=LoadConfig(load_format=request.load_format),
        )
    named = request.weight_version
    updater.record_weight_version_after_update(str(version) if named is None else named)


def synchronise() -> None:
    """Everything that the device was given to do is done: the overlap schedule runs ahead."""
    torch.get_device_module().synchronize()
