"""What engines compute from params after they were loaded, and how it is computed again after a commit.

An engine's own post-processing cannot be run twice: it transposes and permutes what it finds. So each derived tensor
needs a function that recomputes it, in place, for one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from gpusync.errors import LayoutError, RefusedError
from gpusync.hooks import run_hook
from gpusync.layout.targets import iterate_attributes, named_tensors, storage_key

Recompute = Callable[[torch.nn.Module], Any]
Forms = dict[tuple[str, int], tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """`module`: a pattern of module names (`*.self_attn`) or a module type. `params`: patterns of the names, within
    that module, of the params that `recompute` reads.
    """

    module: str | type[torch.nn.Module]
    recompute: Recompute
    params: tuple[str, ...]

    def covers(self, name: str, module: torch.nn.Module) -> bool:
        if isinstance(self.module, str):
            return fnmatchcase(name, self.module)
        return isinstance(module, self.module)


class DerivedRegistry:
    """Derivations, found by module. Later ones win."""

    def __init__(self) -> None:
        self._derivations: list[Derivation] = []

    def register(
        self, module: str | type[torch.nn.Module], recompute: Recompute, *, params: Sequence[str] = ("*",)
    ) -> None:
        """`recompute(module)` brings everything the engine derived from `params` of a module up to date, in place."""
        self._derivations.append(Derivation(module=module, recompute=recompute, params=tuple(params)))

    def derived_params(self, model: torch.nn.Module) -> dict[str, str]:
        """Params that something is derived from -> the module that derives it. Names as in `named_tensors`."""
        found = {}
        for name, module in model.named_modules():
            derivation = self._find(name, module)
            if derivation is None:
                continue
            for param in named_tensors(module):
                if any(fnmatchcase(param, pattern) for pattern in derivation.params):
                    found[f"{name}.{param}" if name else param] = name
        return found

    def recompute(self, model: torch.nn.Module, modules: Iterable[str]) -> None:
        """Runs the function of each of these modules. Nothing that they hold may move.

        Raises HookError for whatever a function raises, RefusedError naming a tensor that has another address, shape or
        stride afterwards, LayoutError for a module that is not there or has no function.
        """
        by_name = dict(model.named_modules())
        with torch.no_grad():
            for name in modules:
                derivation = self._find(name, by_name[name]) if name in by_name else None
                if derivation is None:
                    raise LayoutError(f"nothing is registered to recompute for module `{name}`")
                before = dict(_addresses(by_name[name]))
                run_hook(derivation.recompute, by_name[name], what=f"the function that recomputes `{name}`")
                _check_unmoved(name, before, dict(_addresses(by_name[name])))

    def _find(self, name: str, module: torch.nn.Module) -> Derivation | None:
        return next((each for each in reversed(self._derivations) if each.covers(name, module)), None)


DERIVED = DerivedRegistry()
"""The registry that adapters and users fill, and that `trace` uses unless it is given another."""


def register_derived(
    module: str | type[torch.nn.Module], recompute: Recompute, *, params: Sequence[str] = ("*",)
) -> None:
    """Registers with `DERIVED`: as `DerivedRegistry.register`."""
    DERIVED.register(module, recompute, params=params)


def _addresses(module: torch.nn.Module) -> Iterator[tuple[tuple[str, int], tuple[object, ...]]]:
    """Where each tensor of the module lies. An attribute may hold several: they are numbered."""
    counted: dict[str, int] = {}
    for name, tensor in iterate_attributes(module):
        number = counted[name] = counted.get(name, -1) + 1
        form = (storage_key(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        yield (name, number), form


def _check_unmoved(module: str, before: Forms, after: Forms) -> None:
    for (name, number), form in before.items():
        if after.get((name, number)) != form:
            raise RefusedError(
                f"recomputing `{module}` has moved `{name}`: captured graphs would go on with the old one",
                expected="the same address, shape and strides",
                found="another tensor" if (name, number) in after else "nothing",
            )
