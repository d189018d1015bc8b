"""One rank's weights and the stream that they follow: a `WeightSync`, made when the first request names directories, and
made anew when something else has changed the weights: attaching finds out, by every byte, which version is live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpusync.engines.sglang.derived import register_absorbed
from gpusync.engines.sglang.layout import resolve_base, trace_runners
from gpusync.engines.sglang.settings import Settings
from gpusync.errors import GpusyncError, RefusedError
from gpusync.layout import DERIVED, LayoutMap, attach, named_tensors
from gpusync.stream import read_checkpoint
from gpusync.sync import Prepared, SyncReport, WeightSync

Reload = Callable[[Path], object]


class Follower:
    """Called by one thread at a time. `status` is what may be told at any time: it is replaced, never changed."""

    def __init__(
        self, model: torch.nn.Module, layout: LayoutMap, *, base_dir: Path, group: Any, settings: Settings
    ) -> None:
        self._model, self._layout, self._base_dir = model, layout, base_dir
        self._group, self._settings = group, settings
        self._sync: WeightSync | None = None
        self._directories: tuple[Path, Path] | None = None
        self._forgotten: str | None = "nothing was pulled yet"
        self._reload: Reload = _no_reload
        self.status: Mapping[str, Any] = {}
        self._tell()

    @classmethod
    def of(cls, runners: Iterable[tuple[str, Any]], *, group: Any, settings: Settings) -> Follower:
        """Traces the layout. Whatever sglang's model classes raise comes through."""
        every = list(runners)
        base_dir = resolve_base(every)
        for _, runner in every:
            register_absorbed(runner.model, DERIVED)
        tensors = read_checkpoint(base_dir, follow_links=True).tensors
        model, layout = trace_runners(every, tensors)
        return cls(model, layout, base_dir=base_dir, group=group, settings=settings)

    @property
    def facts(self) -> dict[str, Any]:
        bound, _ = attach(self._layout, named_tensors(self._model))
        opaque = {name: p.reason for name, p in bound.placements.items() if p.reason is not None}
        return {
            "base_dir": str(self._base_dir),
            "bytes_by_class": bound.bytes_by_class(),
            "opaque": dict(list(opaque.items())[:8]),
        }

    def prepare(self, version: int, *, source_dir: Path, local_checkpoint_dir: Path) -> str:
        """A collective. Returns, in words, what waits for its commit."""
        try:
            prepared = self._attached(source_dir, local_checkpoint_dir).prepare(version)
        finally:
            self._tell()
        report = prepared.report
        return f"version {version} is prepared; its commit: {report.commit_path} ({report.reason})"

    def would_commit(self, directory: str, weight_version: str | None) -> tuple[bool, str]:
        """Whether a reload from `directory`, named `weight_version`, is the commit of what is prepared; and why not."""
        if self._sync is None or self._directories is None or self._sync.prepared is None:
            return False, "nothing is prepared"
        if Path(directory).resolve() != self._directories[1]:
            return False, "it is not the local checkpoint that is followed"
        prepared = self._sync.prepared.version
        if weight_version is not None and weight_version != str(prepared):
            return False, f"it is named {weight_version!r}, and version {prepared} is prepared"
        return True, ""

    def commit(self, reload: Reload) -> SyncReport:
        """A collective, with the model at rest. `reload` is the engine's ordinary one, which a version may need."""
        sync = self._sync
        if sync is None or sync.prepared is None:
            raise RefusedError("nothing is prepared")
        self._reload = reload
        try:
            return sync.commit(sync.prepared)
        finally:
            self._reload = _no_reload
            self._tell()

    def abort(self, version: int | None) -> str:
        prepared = None if self._sync is None else self._sync.prepared
        if self._sync is None or prepared is None or version not in (None, prepared.version):
            return "nothing to drop" if version is None else f"version {version} is not prepared"
        self._sync.abort()
        self._tell()
        return f"version {prepared.version} is no longer prepared"

    def before_reload(self, directory: str) -> None:
        """An ordinary reload comes: if it reads the local checkpoint, its files are brought up to date first."""
        if self._sync is not None and self._directories is not None:
            if Path(directory).resolve() == self._directories[1]:
                self._sync.flush(self._settings.timeout_s)
            else:
                self._sync.abort()

    def forget(self, reason: str) -> None:
        """Something else has changed the weights, or will. The next prepare finds out what is live."""
        if self._sync is not None:
            self._sync.abort()
        self._forgotten = reason
        self._tell()

    def _attached(self, source_dir: Path, local_checkpoint_dir: Path) -> WeightSync:
        directories = (source_dir, local_checkpoint_dir.resolve())
        if self._sync is not None and self._forgotten is None and directories == self._directories:
            return self._sync
        self._close()
        self._sync = WeightSync(
            self._model,
            load_weights=_no_loader,
            layout=self._layout,
            reload=lambda directory: self._reload(directory),
            base_dir=self._base_dir,
            local_checkpoint_dir=local_checkpoint_dir,
            source_dir=source_dir,
            group=self._group,
            timeout=self._settings.timeout_s,
            visibility_timeout=self._settings.visibility_timeout_s,
            pre_read_hook=self._settings.pre_read_hook,
        )
        self._directories, self._forgotten = directories, None
        return self._sync

    def _close(self) -> None:
        sync, self._sync, self._directories = self._sync, None, None
        if sync is not None:
            sync.close()

    def _tell(self) -> None:
        sync = self._sync
        prepared: Prepared | None = None if sync is None else sync.prepared
        known = sync is not None and self._forgotten is None
        self.status = {
            "live": sync.version if known and sync is not None else None,
            "durable": _durable(sync),
            "prepared": None if prepared is None else prepared.version,
            "commit_path": None if prepared is None else prepared.report.commit_path,
            "unknown_because": self._forgotten,
            "source_dir": None if self._directories is None else str(self._directories[0]),
            "local_checkpoint_dir": None if self._directories is None else str(self._directories[1]),
        }


def _durable(sync: WeightSync | None) -> int | None:
    try:
        return None if sync is None else sync.durable_version
    except GpusyncError:
        return None  # this rank does not lead its host


def _no_reload(directory: Path) -> None:
    raise GpusyncError("the engine's reload is only to be had inside its own update", path=directory)


def _no_loader(weights: object) -> None:
    raise GpusyncError("the layout was traced when the server started")
