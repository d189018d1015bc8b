"""Hooks load from either form of import path, and their faults have one shape."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusync.errors import HookError, Where
from gpusync.hooks import load_hook, run_hook


@pytest.mark.parametrize("path", ["os.path:join", "os.path.join"])
def test_both_import_path_forms_load_the_same_callable(path: str) -> None:
    assert load_hook(path) is os.path.join


def test_a_nested_attribute_loads_after_the_colon() -> None:
    assert load_hook("pathlib:Path.exists") is Path.exists


def test_none_and_callables_pass_through() -> None:
    def hook() -> None: ...

    assert load_hook(None) is None
    assert load_hook(hook) is hook


@pytest.mark.parametrize("path", ["", "join", "no_such_module_here:fn", "os.path:no_such_name", "os:sep", ":fn", "os:"])
def test_what_cannot_be_loaded_is_named(path: str) -> None:
    with pytest.raises(HookError, match="post_write_hook"):
        load_hook(path, what="post_write_hook")


def test_a_module_that_fails_on_import_is_a_hook_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook_that_dies.py").write_text("raise ZeroDivisionError('at import')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HookError, match="ZeroDivisionError: at import"):
        load_hook("hook_that_dies:fn")


def test_something_else_than_a_path_or_callable_is_refused() -> None:
    with pytest.raises(HookError, match="neither an import path nor callable"):
        load_hook(7)  # type: ignore[arg-type]


def test_run_hook_passes_its_arguments() -> None:
    seen: list[object] = []
    run_hook(lambda *args: seen.extend(args), "dir", 3, what="pre_read_hook")
    assert seen == ["dir", 3]
    run_hook(None, "dir", what="pre_read_hook")


@pytest.mark.parametrize("raised", [ValueError("no volume"), OSError(5, "no volume"), KeyError("no volume")])
def test_what_a_hook_raises_becomes_a_hook_error_with_its_text(raised: Exception) -> None:
    def hook() -> None:
        raise raised

    with pytest.raises(HookError, match="no volume") as caught:
        run_hook(hook, what="post_write_hook", where=Where(path="/stream/weight_v000001", version=1))
    assert caught.value.__cause__ is raised
    assert (caught.value.path, caught.value.version) == ("/stream/weight_v000001", 1)


def test_an_interrupt_is_not_swallowed() -> None:
    hook: Callable[[], None] = _interrupt
    with pytest.raises(KeyboardInterrupt):
        run_hook(hook, what="post_write_hook")


def _interrupt() -> None:
    raise KeyboardInterrupt
