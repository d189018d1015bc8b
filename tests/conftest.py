"""Fixtures that several directories use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gpusync import PullReport, pull
from gpusync.mirror import workers
from support.checkpoints import State, read_state, small_state, snapshot, write_checkpoint

# No test asserts a time; and a change is judged by the same examples wherever it is judged.
settings.register_profile("gpusync", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("gpusync")


@pytest.fixture(scope="session", autouse=True)
def every_worker_has_work() -> Iterator[None]:
    """The tensors of tests are small: one thread alone would do them, where a test asks for two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "SMALL_BYTES", 1)
        yield


@dataclass
class Site:
    """A base, a stream and a local checkpoint directory under one temporary directory."""

    base: Path
    source: Path
    local: Path
    state: State
    defaults: dict[str, Any] = field(default_factory=dict)

    def pull(self, target: int, **options: Any) -> PullReport:
        return pull(
            local_checkpoint_dir=self.local,
            base_dir=self.base,
            source_dir=self.source,
            target_version=target,
            **{"workers": 2, **self.defaults, **options},
        )

    def local_state(self) -> State:
        return read_state(self.local)

    def local_files(self) -> dict[str, bytes]:
        return snapshot(self.local)

    @property
    def control(self) -> Path:
        return self.local / ".weight_sync"


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[..., Site]:
    def make(state: State | None = None, **files: str) -> Site:
        base = small_state() if state is None else state
        site = Site(base=tmp_path / "base", source=tmp_path / "stream", local=tmp_path / "local", state=base)
        write_checkpoint(site.base, base, files={name.replace("_", "."): text for name, text in files.items()})
        site.source.mkdir()
        return site

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()
