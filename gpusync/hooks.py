"""User hooks: named by import path or given as a callable, loaded early, and never trusted to be without fault.

`pre_read_hook(source_dir, target_version)` makes a published version visible on this host (the signature of slime's
receiver). `post_write_hook(version_dir)` makes what this rank has written visible to others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gpusync.errors import NOWHERE, HookError, Where

Hook = Callable[..., Any]


def load_hook(hook: str | Hook | None, *, what: str = "hook") -> Hook | None:
    """The callable that `hook` names: "pkg.mod:fn", "pkg.mod.fn", a callable as it is, or None for no hook.

    Raises HookError naming what could not be imported, so that a misspelt path fails at start-up, not at the first use.
    """
    if hook is None or callable(hook):
        return hook
    if not isinstance(hook, str):
        raise HookError(f"{what} is neither an import path nor callable", found=type(hook).__name__)
    module_name, _, attribute = hook.partition(":") if ":" in hook else hook.rpartition(".")
    if not module_name or not attribute:
        raise HookError(f"{what} is not an import path", expected="pkg.mod:fn or pkg.mod.fn", found=hook)
    loaded = _import(module_name, attribute, hook, what)
    if not callable(loaded):
        raise HookError(f"{what} {hook} is not callable", found=type(loaded).__name__)
    return loaded


def run_hook(hook: Hook | None, *args: object, what: str, where: Where = NOWHERE) -> None:
    """Call `hook(*args)`; None does nothing. Whatever it raises becomes a HookError that carries its text."""
    if hook is None:
        return
    try:
        hook(*args)
    # A user's hook may raise anything; its caller has to tell it from our own faults and to answer for it in one way.
    except Exception as error:
        raise HookError(f"{what} raised {type(error).__name__}: {error}", where=where) from error


def _import(module_name: str, attribute: str, hook: str, what: str) -> object:
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    # Importing runs the user's module: it is part of the hook, and may raise anything too.
    except Exception as error:
        raise HookError(f"{what} {hook} cannot be loaded: {type(error).__name__}: {error}") from error
    return found
