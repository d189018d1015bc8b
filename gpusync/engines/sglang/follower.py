"""One rank's weights and the stream that they follow: a `WeightSync`, made when the first request names directories,
and made anew when something else has changed the weights: attaching finds out, by every byte, which version is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpusync.engines.settings import Settings
from gpusync.engines.sglang.derived import register_absorbed
from gpusync.engines.sglang.layout import resolve_base, trace_runners
from gpusync.errors import GpusyncError, RefusedError
from gpusync.layout import DERIVED, LayoutMap, attach, named_tensors
from gpusync.stream import read_checkpoint
from gpusync.sync import SyncReport, WeightSync

Reload = Callable[[Path], object]
SHOWN_OPAQUE = 8


class Follower:
    """Called by one thread at a time. `status` may be read at any time: it is replaced, never changed."""

    status: Mapping[str, Any]

    def __init__(
        self, model: torch.nn.Module, layout: LayoutMap, *, base_dir: Path, group: Any, settings: Settings
    ) -> None:
        self._model, self._layout, self._base_dir = model, layout, base_dir
        self._group, self._settings = group, settings
        self._sync: WeightSync | None = None
        self._source: Path | None = None
        self._local: Path | None = None
        self._unknown: str | None = "nothing was pulled yet"
        self._reload: Reload = _no_reload
        self._tell()

    @classmethod
    def of(cls, runners: Iterable[tuple[str, Any]], *, group: Any, settings: Settings) -> Follower:
        """Traces the layout. Whatever sglang's model classes raise comes through."""
        every = list(runners)
        base_dir = resolve_base(every)
        for _, runner in every:
            register_absorbed(runner.model, DERIVED)
        model, layout = trace_runners(every, read_checkpoint(base_dir, follow_links=True).tensors)
        return cls(model, layout, base_dir=base_dir, group=group, settings=settings)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known before anything was pulled."""
        bound, _ = attach(self._layout, named_tensors(self._model))
        opaque = {name: placed.reason for name, placed in bound.placements.items() if placed.reason is not None}
        shown = dict(list(opaque.items())[:SHOWN_OPAQUE])
        return {"base_dir": str(self._base_dir), "bytes_by_class": bound.bytes_by_class(), "opaque": shown}

    def prepare(self, version: int, *, source_dir: Path, local_checkpoint_dir: Path) -> str:
        """A collective. Returns, in words, what waits for its commit."""
        try:
            report = self._attached(source_dir, local_checkpoint_dir.resolve()).prepare(version).report
        finally:
            self._tell()
        self._tell(report)
        return f"version {version} is prepared; its commit: {report.commit_path} ({report.reason})"

    def why_no_commit(self, directory: str, weight_version: str | None) -> str | None:
        """Why a reload from `directory`, named `weight_version`, is not the commit of what is prepared."""
        if self._sync is None or self._sync.prepared is None:
            return "nothing is prepared"
        if Path(directory).resolve() != self._local:
            return "it is not the local checkpoint that is followed"
        prepared = self._sync.prepared.version
        if weight_version is not None and weight_version != str(prepared):
            return f"it is named {weight_version!r}, and version {prepared} is prepared"
        return None

    def commit(self, reload: Reload) -> SyncReport:
        """A collective, with the model at rest. `reload` is the engine's ordinary one, which a version may need."""
        sync = self._sync
        if sync is None or sync.prepared is None:
            raise RefusedError("nothing is prepared")
        self._reload = reload
        try:
            report = sync.commit(sync.prepared)
        finally:
            self._reload = _no_reload
            if sync.version is None and sync.in_doubt is None:
                self._unknown = "a commit failed, and so did undoing it"
            self._tell()
        self._tell(report)
        return report

    def abort(self, version: int | None) -> str:
        prepared = None if self._sync is None else self._sync.prepared
        if self._sync is None or prepared is None or version not in (None, prepared.version):
            return "nothing is prepared" if version is None else f"version {version} is not prepared"
        self._sync.abort()
        self._tell()
        return f"version {prepared.version} is no longer prepared"

    def before_reload(self, directory: str) -> None:
        """An ordinary reload comes. Where it reads the local checkpoint, its files are brought up to date first: a
        collective."""
        if self._sync is not None and Path(directory).resolve() == self._local:
            self._sync.flush(self._settings.timeout_s)

    def forget(self, reason: str) -> None:
        """Something else changes the weights. The next prepare finds out what is live then."""
        if self._sync is not None:
            self._sync.abort()
            self._unknown = reason
        self._tell()

    def _attached(self, source: Path, local: Path) -> WeightSync:
        if self._sync is not None and self._unknown is None and (source, local) == (self._source, self._local):
            return self._sync
        self._close()
        self._sync = WeightSync(
            self._model,
            load_weights=_no_loader,
            layout=self._layout,
            reload=self._run_reload,
            base_dir=self._base_dir,
            local_checkpoint_dir=local,
            source_dir=source,
            group=self._group,
            timeout=self._settings.timeout_s,
            visibility_timeout=self._settings.visibility_timeout_s,
            pre_read_hook=self._settings.pre_read_hook,
        )
        self._source, self._local, self._unknown = source, local, None
        return self._sync

    def _run_reload(self, directory: Path) -> None:
        self._reload(directory)

    def _close(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    def _tell(self, report: SyncReport | None = None) -> None:
        sync = self._sync
        prepared = None if sync is None else sync.prepared
        self.status = {
            "live": None if sync is None or self._unknown is not None else sync.version,
            "unknown_because": self._unknown,
            "durable": _durable(sync),
            "prepared": None if prepared is None else prepared.version,
            "commit_path": None if prepared is None else prepared.report.commit_path,
            "in_doubt": None if sync is None else sync.in_doubt,
            "source_dir": None if self._source is None else str(self._source),
            "local_checkpoint_dir": None if self._local is None else str(self._local),
            "report": {} if report is None else report.as_dict(),
        }


def _durable(sync: WeightSync | None) -> int | None:
    try:
        return None if sync is None else sync.durable_version
    except GpusyncError:
        return None  # known to the leader of a host alone, and never worth failing an update that has succeeded


def _no_reload(directory: Path) -> None:
    raise GpusyncError("the engine's reload is to be had only inside its own update", path=directory)


def _no_loader(_: object) -> None:
    raise GpusyncError("the layout was traced when the server started")
