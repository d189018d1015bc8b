"""What one worker does with its part of the weights. Every method is done by all workers together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpusync.engines.agent.held import HeldWeights
from gpusync.engines.agent.settings import AgentSettings, Place
from gpusync.errors import RefusedError
from gpusync.mirror.local import read_local_version
from gpusync.mirror.mirror import Mirror
from gpusync.stream import OpenFiles, read_checkpoint
from gpusync.sync import WeightSync
from gpusync.sync.checkpoints import torch_tensors
from gpusync.verdict.members import Members


class Follower:
    """`members` are the workers; None: this one alone."""

    def __init__(self, settings: AgentSettings, *, rank: int, members: Members | None) -> None:
        self._settings, self._rank, self._members = settings, rank, members
        self._base = read_checkpoint(settings.model, follow_links=True)
        self._held = HeldWeights(
            self._base.tensors, rank=rank, size=settings.tp, device=choose_device(settings.device, rank=rank)
        )
        self._sync: WeightSync | None = None

    def recover(self, place: Place) -> None:
        """Bring the local checkpoint's files to what is durable. By one worker, before any of them loads."""
        with Mirror(
            place.local_checkpoint_dir,
            base_dir=self._settings.model,
            source_dir=place.source_dir,
            lock_timeout=self._settings.timeout_s,
        ) as mirror:
            mirror.flush(self._settings.timeout_s)

    def load(self, local_checkpoint_dir: Path | None) -> None:
        """Load the local checkpoint if it holds a version, else the model."""
        known = None if local_checkpoint_dir is None else read_local_version(local_checkpoint_dir)
        with OpenFiles() as files, torch.no_grad():
            self._held.load_weights(torch_tensors(self._base if known is None else known[1], files))

    def attach(self, place: Place) -> None:
        self.close()
        self._sync = WeightSync(
            self._held,
            load_weights=self._held.load_weights,
            base_dir=self._settings.model,
            local_checkpoint_dir=place.local_checkpoint_dir,
            source_dir=place.source_dir,
            group=self._members,
            timeout=self._settings.timeout_s,
            visibility_timeout=self._settings.visibility_timeout_s,
            pre_read_hook=self._settings.pre_read_hook,
        )

    def prepare(self, version: int) -> dict[str, object]:
        return self._attached().prepare(version).report.as_dict()

    def commit(self, version: int) -> dict[str, object]:
        sync = self._attached()
        prepared = sync.prepared
        if prepared is None or prepared.version != version:
            found = "nothing" if prepared is None else f"version {prepared.version}"
            raise RefusedError("what is to be committed is not prepared", version=version, found=found)
        return sync.commit(prepared).as_dict()

    def abort(self) -> None:
        self._attached().abort()

    def digests(self) -> dict[str, dict[str, object]]:
        return self._held.digests()

    def status(self) -> dict[str, Any]:
        sync = self._sync
        if sync is None:
            return {"in_doubt": "not attached to a local checkpoint yet"}
        prepared = sync.prepared
        return {
            "live": sync.version,
            "durable": sync.durable_version if self._rank == 0 else None,
            "prepared": None if prepared is None else prepared.version,
            "commit_path": None if prepared is None else prepared.report.commit_path,
            "in_doubt": sync.in_doubt,
        }

    def close(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    def _attached(self) -> WeightSync:
        if self._sync is None:
            raise RefusedError("not attached to a local checkpoint yet")
        return self._sync


def choose_device(wanted: str, *, rank: int) -> torch.device:
    """`auto` is CUDA where there is any; a worker takes the device of its rank."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cuda":
        return torch.device(wanted)
    if rank >= torch.cuda.device_count():
        raise RefusedError("more workers than CUDA devices", expected=rank + 1, found=torch.cuda.device_count())
    return torch.device("cuda", rank)
