"""One rank's weights and the stream that they follow: a `WeightSync`, made when the first request names directories,
and made anew when something else has changed the weights: attaching finds out, by every byte, which version is live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpusync.engines.vllm.settings import Settings
from gpusync.errors import GpusyncError, RefusedError
from gpusync.layout import LayoutMap, attach, named_tensors
from gpusync.sync import SyncReport, WeightSync

SHOWN_OPAQUE = 8
RESET = "the local checkpoint has become the base again, which was not loaded"


class Follower:
    """Called by one thread at a time. `status` may be read at any time: it is replaced, never changed. `reload` is the
    engine's ordinary one; it is run inside a commit only, and `find_omission` says behind it what it has left out: such
    an engine is in doubt for good."""

    status: Mapping[str, Any]

    def __init__(
        self,
        model: torch.nn.Module,
        layout: LayoutMap,
        *,
        base_dir: Path,
        group: Any,
        settings: Settings,
        reload: Callable[[Path], object],
        find_omission: Callable[[Path], str | None] = lambda _: None,
    ) -> None:
        self._model, self._layout, self._base_dir = model, layout, base_dir
        self._group, self._settings = group, settings
        self._reload, self._find_omission = reload, find_omission
        self._broken: str | None = None
        self._sync: WeightSync | None = None
        self._source: Path | None = None
        self._local: Path | None = None
        self._unknown: str | None = "nothing was pulled yet"
        self._tell()

    @property
    def facts(self) -> dict[str, Any]:
        """What is known before anything was pulled."""
        bound, _ = attach(self._layout, named_tensors(self._model))
        opaque = {name: placed.reason for name, placed in bound.placements.items() if placed.reason is not None}
        shown = dict(list(opaque.items())[:SHOWN_OPAQUE])
        return {"base_dir": str(self._base_dir), "bytes_by_class": bound.bytes_by_class(), "opaque": shown}

    def prepare(self, version: int, *, source_dir: Path, local_checkpoint_dir: Path) -> str:
        """A collective. Returns, in words, what waits for its commit."""
        if self._broken is not None:
            raise RefusedError(self._broken)
        if version != 0 and self._is_reset:
            self.forget(RESET)
        try:
            report = self._attached(source_dir, local_checkpoint_dir.resolve()).prepare(version).report
        finally:
            self._tell()
        self._tell(report)
        return f"version {version} is prepared; its commit: {report.commit_path} ({report.reason})"

    def commit(self, version: int) -> SyncReport:
        """A collective, with the model at rest."""
        sync = self._sync
        if sync is None or sync.prepared is None or sync.prepared.version != version:
            raise RefusedError("not what is prepared", version=version, expected=self.status["prepared"])
        try:
            report = sync.commit(sync.prepared)
        finally:
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
        self._broken = self._find_omission(directory)
        if self._broken is not None:
            raise GpusyncError(self._broken, path=directory)

    def _close(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    @property
    def _is_reset(self) -> bool:
        """A new run has begun with version 0, and the weights are those of the run before."""
        prepared = None if self._sync is None else self._sync.prepared
        return prepared is not None and prepared.version == 0 and prepared.report.commit_path != "nothing"

    def _tell(self, report: SyncReport | None = None) -> None:
        sync, unknown = self._sync, RESET if self._is_reset else self._unknown
        prepared = None if sync is None else sync.prepared
        self.status = {
            "live": None if sync is None or unknown is not None else sync.version,
            "unknown_because": unknown,
            "durable": _durable(sync),
            "prepared": None if prepared is None else prepared.version,
            "commit_path": None if prepared is None else prepared.report.commit_path,
            "in_doubt": self._broken or (None if sync is None else sync.in_doubt),
            "source_dir": None if self._source is None else str(self._source),
            "local_checkpoint_dir": None if self._local is None else str(self._local),
            "report": {} if report is None else report.as_dict(),
        }


def _durable(sync: WeightSync | None) -> int | None:
    try:
        return None if sync is None else sync.durable_version
    except GpusyncError:
        return None  # known to the leader of a host alone, and never worth failing an update that has succeeded


def _no_loader(_: object) -> None:
    raise GpusyncError("the layout was traced when the server started")
