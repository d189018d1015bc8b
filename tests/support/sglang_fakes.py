"""Stand-ins for the parts of sglang that the plugin calls, where no server runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpusync.engines.sglang import messages


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of sglang with the few names that are imported from them, and the plugin's messages."""
    modules = {
        "sglang.srt.managers.io_struct": {"UpdateWeightFromDiskReqOutput": SimpleNamespace},
        "sglang.srt.configs.load_config": {"LoadConfig": SimpleNamespace},
        "sglang.srt.utils.auth": {
            "AuthLevel": SimpleNamespace(ADMIN_OPTIONAL="admin"),
            "auth_level": lambda level: lambda function: function,
        },
        "sglang.srt.entrypoints": {"http_server": SimpleNamespace()},
    }
    for name, attributes in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in {**messages.REQUESTS, **messages.ANSWERS}:
        monkeypatch.setitem(vars(messages), name, SimpleNamespace)


class FakeUpdater:
    """sglang's weight updater of one rank: writes down what it is told."""

    def __init__(self, *, flushes: bool = True) -> None:
        self.offload_tags: set[str] = set()
        self._session = None
        self.flushes, self.recorded, self.fields = flushes, [], []
        self.runner = SimpleNamespace(
            model=object(),
            model_config=SimpleNamespace(model_path="/base"),
            update_model_fields=lambda model, **fields: self.fields.append(fields),
        )

    def _select_runners(self, selector: str) -> list[tuple[str, Any]]:
        assert selector == "all"
        return [("target", self.runner)]

    def record_weight_version_after_update(self, version: str) -> None:
        self.recorded.append(version)

    def flush_cache_after_weight_update(self, request: Any, success: bool, message: str) -> tuple[bool, str]:
        return (success, message) if self.flushes else (False, "the cache was not flushed")


class FakeFollower:
    """`preparing` runs in place of a prepare, `committing` in place of a commit; either may raise."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"live": 0, "prepared": None, "in_doubt": None}
        self.preparing: Callable[[], None] = lambda: None
        self.committing: Callable[[], None] = lambda: None
        self.events: list[str] = []

    def prepare(self, version: int, *, source_dir: Path, local_checkpoint_dir: Path) -> str:
        self.preparing()
        self.status = {**self.status, "prepared": version}
        return f"version {version} is prepared"

    def why_no_commit(self, directory: str, weight_version: str | None) -> str | None:
        return None if self.status["prepared"] is not None else "nothing is prepared"

    def commit(self, reload: Callable[[Path], object]) -> Any:
        self.committing()
        version, self.status = self.status["prepared"], {**self.status, "prepared": None}
        self.status["live"] = version
        return SimpleNamespace(version=version, commit_path="in place", reason="continues the store")

    def abort(self, version: int | None) -> str:
        self.events.append("abort")
        self.status = {**self.status, "prepared": None}
        return "dropped"

    def before_reload(self, directory: str) -> None:
        self.events.append(f"before reload from {directory}")

    def forget(self, reason: str) -> None:
        self.events.append(f"forget: {reason}")
