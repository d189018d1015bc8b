"""The layout of a rank's models: traced on a twin that sglang itself makes, on the meta device.

Made while the server starts: sglang makes models under process-wide settings, which must not change beside its loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gpusync.errors import RefusedError
from gpusync.layout import (
    DERIVED,
    Demotion,
    LayoutMap,
    TensorForm,
    attach,
    find_unmapped,
    named_tensors,
    trace,
)
from gpusync.layout.targets import iterate_attributes


class Runners(torch.nn.Module):
    """The models of a rank as one: its target, and the drafts that are loaded from the same checkpoint."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)


def trace_runners(runners: Iterable[tuple[str, Any]], tensors: Mapping[str, TensorForm]) -> tuple[Any, LayoutMap]:
    """The model that holds all of this rank's weights, and its layout for a checkpoint of these tensors."""
    own = [runner for _, runner in runners]
    twins = [make_twin(runner) for runner in own]
    model, twin = _as_one([runner.model for runner in own]), _as_one(twins)
    had = {attribute for attribute, _ in iterate_attributes(twin)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        every = list(weights)
        for runner, each in zip(own, twins, strict=True):
            _load(runner, each, every)

    layout = trace(twin, load, tensors, derived=DERIVED, is_twin=True)
    return model, _without_unknown_caches(layout, model, had)


def make_twin(runner: Any) -> torch.nn.Module:
    """A model like the runner's, on the meta device, not loaded."""
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    quantization = loader._get_quantization_config(runner.model_config, runner.load_config)
    with set_default_torch_dtype(runner.model_config.dtype), torch.device("meta"):
        twin: torch.nn.Module = loader._initialize_model(runner.model_config, runner.load_config, quantization)
    return twin


def resolve_base(runners: Iterable[tuple[str, Any]]) -> Path:
    """The directory that the models were loaded from. Raises RefusedError if there are several."""
    configs = [runner.model_config for _, runner in runners]
    paths = list(dict.fromkeys(str(config.model_path) for config in configs))
    if len(paths) > 1:
        raise RefusedError("a draft model was loaded from another checkpoint", expected=paths[0], found=paths[1])
    path = Path(paths[0])
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(paths[0], revision=configs[0].revision, local_files_only=True)).resolve()


def _load(runner: Any, twin: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]) -> None:
    """As sglang's loader gives a checkpoint's tensors to a model."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    given: Iterator[tuple[str, torch.Tensor]] = iter(weights)
    if runner.load_config.draft_model_idx is not None:
        given = DefaultModelLoader._filter_mtp_weights(given, "", runner.load_config.draft_model_idx)
    with torch.no_grad():
        DefaultModelLoader.load_weights_only(twin, given, torch.device(runner.device))


def _as_one(models: list[torch.nn.Module]) -> torch.nn.Module:
    return models[0] if len(models) == 1 else Runners(models)


def _without_unknown_caches(layout: LayoutMap, model: torch.nn.Module, had: set[str]) -> LayoutMap:
    """Without those tensors whose module holds, since the load, something that the engine has made of them and nothing
    is registered to recompute: patched alone, the params would no longer fit it."""
    bound, _ = attach(layout, named_tensors(model))
    known = set(DERIVED.derived_params(model).values())
    caches = {
        attribute.rpartition(".")[0]: attribute
        for attribute in find_unmapped(bound, model)
        if attribute not in had and attribute.rpartition(".")[0] not in known
    }
    return layout.demoted(
        Demotion(tensor=name, reason=f"the engine keeps `{caches[module]}`, which is unknown and may be made of it")
        for name, placement in layout.placements.items()
        for module in [_module_with_cache(placement.pieces, caches)]
        if module is not None and placement.is_patched
    )


def _module_with_cache(pieces: Iterable[Any], caches: Mapping[str, str]) -> str | None:
    params = [piece.param for piece in pieces]
    return next((module for module in caches for param in params if f"{param}.".startswith(f"{module}.")), None)
