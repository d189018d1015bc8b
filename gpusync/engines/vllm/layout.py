"""The layout of a rank's model: traced on a twin that vLLM itself makes, on the meta device.

Made in the worker's own thread: vLLM makes models under process-wide settings, which must not change beside its loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from gpusync.layout import DERIVED, Demotion, LayoutMap, TensorForm, attach, find_unmapped, named_tensors, trace
from gpusync.layout.targets import iterate_attributes

Hidden = Mapping[str, str]


def trace_model(worker: Any, tensors: Mapping[str, TensorForm]) -> LayoutMap:
    """The layout of the worker's model for a checkpoint of these tensors."""
    twin, model = make_twin(worker.vllm_config), worker.get_model()
    had = {attribute for attribute, _ in iterate_attributes(twin)}
    had |= {attribute for attribute, _ in iterate_closures(twin)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            twin.load_weights(weights)

    with _current(worker.vllm_config):
        layout = trace(twin, load, tensors, is_twin=True)
    return without_copies(layout, model, had)


def make_twin(config: Any) -> Any:
    """A model like the one that serves, on the meta device, not loaded. Its layers are registered nowhere."""
    from vllm.config import CompilationMode
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.mode = CompilationMode.NONE
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        return initialize_model(own)


def resolve_base(config: Any) -> Path:
    """The directory that the model was loaded from."""
    path = Path(config.model_config.model)
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import snapshot_download

    revision = config.model_config.revision
    return Path(snapshot_download(str(path), revision=revision, local_files_only=True)).resolve()


def without_copies(layout: LayoutMap, model: torch.nn.Module, had: set[str]) -> LayoutMap:
    """Without the tensors of those modules that hold, since the load, something the engine may have made of them: a
    tensor, or a function that has captured something, neither of which the twin `had`. Patched alone, the params would
    no longer fit it."""
    bound, _ = attach(layout, named_tensors(model))
    known = set(DERIVED.derived_params(model).values())
    made = {name: name for name in find_unmapped(bound, model) if name not in had}
    made |= {name: name for name, _ in iterate_closures(model) if name not in had}
    by_module = {name.rpartition(".")[0]: name for name in made}
    hidden = {
        storage: attribute
        for module, attribute in by_module.items()
        if module not in known
        for storage in _storages_below(layout, model, module)
    }
    return layout.demoted(
        Demotion(tensor=name, reason=f"the engine keeps `{hidden[storage]}`, which may be made of it")
        for name, placement in layout.placements.items()
        if placement.is_patched
        for storage in [next((p.param for p in placement.pieces if p.param in hidden), None)]
        if storage is not None
    )


def iterate_closures(model: torch.nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that modules hold in plain attributes, and lists of them, and that have captured something: vLLM's
    kernels for a CPU keep a packed copy of a weight so."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            for each in values:
                if isinstance(each, FunctionType) and each.__closure__:
                    yield f"{path}.{name}".lstrip("."), each


def _storages_below(layout: LayoutMap, model: torch.nn.Module, module: str) -> set[str]:
    """Storages of the map that params of this module lie in, under whatever name: attention shares its projections with
    the module around it."""
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model).items())}
    below = named_tensors(model.get_submodule(module))
    found = (names.get(id(tensor)) for tensor in below.values())
    return {layout.params[name].storage for name in found if name is not None and name in layout.params}


def _current(config: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)
