"""Live weights brought to a version: slime's way against gpusync's, in one process on the same data.

(a) slime's way: slime's xor patches the local checkpoint, then every tensor is loaded from it into live params. The
patching is `gpusync.pull()`'s; with `--slime-steps` it is measured by the steps of slime's own receiver as well.
(b) gpusync: `prepare` verifies beside the params, `commit` changes them in place; the local checkpoint follows behind.

One rank, params as the checkpoint names them (gate_up and qkv fused, as engines do). After every measured commit the
live params are compared with the published state; if one byte is wrong, no figure is printed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
from harness import Report, emit, stopwatch
from slime_steps import pull_as_slime
from synthetic import SIZES, Settings, write_base, write_next

from gpusync import Publisher, WeightSync, pull
from gpusync.demo.checkpoints import check_equal
from gpusync.publish import CheckpointTensors
from gpusync.stream import Checkpoint, OpenFiles, read_checkpoint, version_path
from gpusync.sync import SyncReport
from gpusync_kernels.host import host_ops

# At most so much of (a) for all of (b); of the reload for the commit; and for the commit without its comparison.
SLIME_TARGETS = (0.8, 0.5, None)
GPUSYNC_TARGETS = {"numba": (0.3, None, 0.2), "numpy": (0.3, None, 0.5)}
STAGES = ("fetch", "decode", "stage", "digest", "fingerprint", "agree", "commit")
_FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="3GB", show_default=True)
@click.option("--density", default=0.01, show_default=True, help="Share of elements that a version changes.")
@click.option("--encoding", type=click.Choice(["xor", "overwrite", "gpusync"]), default="xor", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Measured versions, each taken both ways.")
@click.option(
    "--slime-steps", is_flag=True, help="Follow it by slime's own steps too; needs page cache for one checkpoint more."
)
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    size: str,
    density: float,
    encoding: str,
    repeats: int,
    slime_steps: bool,
    work_dir: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=work_dir) as temporary:
        settings = Settings(nbytes=SIZES[size], density=density)
        bench = Bench(work=Path(temporary), settings=settings, encoding=encoding, slime_steps=slime_steps)
        bench.start()
        bench.measure()  # the first version warms the page cache, and is the first look at the mirror's files
        taken = [bench.measure() for _ in range(repeats)]
        emit([_report(bench, taken)], directory=bench.work, as_json=as_json, as_csv=as_csv)
        bench.close()


class FusedModel(torch.nn.Module):
    """The checkpoint's tensors as params; projections that engines fuse lie in one."""

    def __init__(self, checkpoint: Checkpoint, *, device: str = "cpu") -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int, int]] = {}
        rows: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, stored in sorted(checkpoint.tensors.items(), key=lambda item: (_fused(item[0]), item[0])):
            param, _ = _fused(name)
            start = rows.get(param, 0)
            rows[param] = start + stored.shape[0]
            self.places[name] = (param.replace(".", "/"), start, stored.shape[0])
            shapes[param] = (rows[param], *stored.shape[1:])
        for param, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(param.replace(".", "/"), torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            param, start, count = self.places[name]
            self._parameters[param].data.narrow(0, start, count).copy_(tensor)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError for the first tensor that is not the checkpoint's."""
        with OpenFiles() as files:
            for name, stored in checkpoint.tensors.items():
                param, start, count = self.places[name]
                live = self._parameters[param].data.narrow(0, start, count).view(torch.uint8).numpy().reshape(-1)
                expected = np.empty(stored.nbytes, np.uint8)
                with checkpoint.open_tensor(name, files) as source:
                    source.read_into(0, memoryview(expected))
                if not np.array_equal(live, expected):
                    raise ValueError(f"live tensor {name} is wrong")


def _fused(name: str) -> tuple[str, int]:
    for part, (fused, place) in _FUSED.items():
        if part in name:
            return name.replace(part, fused), place
    return name, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Wall seconds of one version, taken both ways."""

    pull_s: float
    slime_s: float | None
    reload_s: float
    prepare_s: float
    commit_s: float
    report: SyncReport

    @property
    def disk_s(self) -> float:
        return self.pull_s + self.reload_s

    @property
    def sync_s(self) -> float:
        return self.prepare_s + self.commit_s


@dataclass(slots=True, kw_only=True)
class Bench:
    """A stream and a model that is synchronised; beside them slime's xor of the same versions and a model that is
    reloaded. `version` is the newest published."""

    work: Path
    settings: Settings
    encoding: str
    slime_steps: bool
    version: int = 0
    elements: int = 0
    elements_changed: int = 0
    publishers: list[Publisher] = field(init=False)
    sync: WeightSync = field(init=False)
    model: FusedModel = field(init=False)
    rival: FusedModel = field(init=False)

    def state_dir(self, version: int) -> Path:
        return self.work / f"state_{version}"

    def start(self) -> None:
        self.elements = write_base(self.state_dir(0), self.settings)
        streams = {"stream": self.encoding, "slime-stream": "xor"}
        self.publishers = [
            Publisher(self.work / name, base_dir=self.state_dir(0), encoding=encoding)
            for name, encoding in streams.items()
        ]
        if self.slime_steps:
            shutil.copytree(self.state_dir(0), self.work / "slime")
        base = read_checkpoint(self.state_dir(0))
        self.model, self.rival = FusedModel(base), FusedModel(base)
        self.model.load_weights(_stored_tensors(self.state_dir(0)))
        self.sync = WeightSync(
            self.model,
            load_weights=self.model.load_weights,
            base_dir=self.state_dir(0),
            local_checkpoint_dir=self.work / "live",
            source_dir=self.work / "stream",
        )

    def measure(self) -> Taken:
        before, self.version = self.state_dir(self.version), self.version + 1
        after = self.state_dir(self.version)
        self.elements_changed = write_next(before, after, self.settings, step=self.version)
        for publisher in self.publishers:
            publisher.publish(CheckpointTensors(after), version=self.version)
        if self.version >= 2:  # version 0 stays: it is the base of both ways
            shutil.rmtree(before)
        os.sync()
        slime_s = None
        if self.slime_steps:
            slime_s = self._timed(self._pull_as_slime)
            os.sync()
        pull_s = self._timed(self._pull)
        reload_s = self._timed(lambda: self.rival.load_weights(_stored_tensors(self.work / "disk")))
        os.sync()
        prepared = None

        def prepare() -> None:
            nonlocal prepared
            prepared = self.sync.prepare(self.version)

        prepare_s = self._timed(prepare)
        commit_s = self._timed(lambda: self.sync.commit(prepared))
        self.sync.flush()
        for model in (self.model, self.rival):
            model.check(read_checkpoint(after))
        for name in ("live", "disk", *(["slime"] if self.slime_steps else [])):
            check_equal(self.work / name, after)
        return Taken(
            pull_s=pull_s,
            slime_s=slime_s,
            reload_s=reload_s,
            prepare_s=prepare_s,
            commit_s=commit_s,
            report=self.sync.report,
        )

    def close(self) -> None:
        self.sync.close()

    def _pull(self) -> None:
        pull(
            local_checkpoint_dir=self.work / "disk",
            base_dir=self.state_dir(0),
            source_dir=self.work / "slime-stream",
            target_version=self.version,
        )

    def _pull_as_slime(self) -> None:
        pull_as_slime(self.work / "slime", source_dir=self.work / "slime-stream", version=self.version)

    def _timed(self, work: object) -> float:
        with stopwatch() as seconds:
            work()
            return seconds()[0]


def _stored_tensors(directory: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """As engines read a checkpoint: safetensors, file by file."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _report(bench: Bench, taken: list[Taken]) -> Report:
    nbytes = 2 * bench.elements

    def median(what: str) -> float:
        return statistics.median(getattr(each, what) for each in taken)

    slime_s = median("slime_s") if bench.slime_steps else None
    rows = [
        _row("(a) pull to disk", median("pull_s"), nbytes),
        *([] if slime_s is None else [_row("(a) the same by slime's own steps", slime_s, nbytes)]),
        _row("(a) reload of all tensors: the pause", median("reload_s"), nbytes),
        _row("(a) sum", median("disk_s"), nbytes),
        *([] if slime_s is None else [_row("(a) sum by slime's own steps", slime_s + median("reload_s"), nbytes)]),
        _row("(b) prepare, beside serving", median("prepare_s"), nbytes),
        *(
            _row(f"      {stage}", statistics.median(each.report.seconds[stage] for each in taken), nbytes)
            for stage in STAGES
        ),
        _row("(b) commit: the pause", median("commit_s"), nbytes),
        _row("(b) sum", median("sync_s"), nbytes),
    ]
    last = taken[-1].report
    wire = sum(file.stat().st_size for file in version_path(bench.work / "stream", bench.version).iterdir())
    whole, pause = median("sync_s") / median("disk_s"), median("commit_s") / median("reload_s")
    bare = statistics.median(each.report.seconds["commit"] for each in taken) / median("reload_s")
    max_whole, max_pause, max_bare = _targets(bench.encoding)
    return Report(
        title=f"{bench.encoding} delta of {bench.settings.density:.2%}, live, median of {len(taken)}",
        columns=("part", "wall s", "GB/s"),
        rows=rows,
        notes=[
            f"prepare + commit over pull + reload: {whole:.2f} {_judged(whole, max_whole, bench)}",
            *([] if slime_s is None else [_over_slime(median("sync_s"), slime_s + median("reload_s"))]),
            f"commit over reload: {pause:.2f} {_judged(pause, max_pause, bench)}",
            f"commit without comparing live bytes, over reload: {bare:.2f} {_judged(bare, max_bare, bench)}",
            f"{bench.elements_changed / bench.elements:.2%} of the elements changed; the version is {wire:,} bytes, "
            f"{wire / nbytes:.2%} of the checkpoint's {nbytes:,}; compact {last.compact_bytes:,} bytes",
            f"decoder: {last.decoder}; applier: {last.applier}; commit path: {last.commit_path}; "
            f"staging at most {last.peak_staging_bytes / 1e6:.0f} MB",
            "after every commit the live params, the reloaded ones and all local files were the published bytes",
        ],
    )


def _targets(encoding: str) -> tuple[float | None, ...]:
    return GPUSYNC_TARGETS[host_ops().name] if encoding == "gpusync" else SLIME_TARGETS


def _over_slime(sync_s: float, slime_s: float) -> str:
    return f"the same over slime's own steps and the reload: {sync_s / slime_s:.2f}"


def _row(part: str, wall_s: float, nbytes: int) -> dict[str, object]:
    return {"part": part, "wall s": wall_s, "GB/s": nbytes / wall_s / 1e9 if wall_s else None}


def _judged(found: float, limit: float | None, bench: Bench) -> str:
    if limit is None:
        return ""
    if bench.settings.nbytes < SIZES["1GB"]:
        return f"(target from 1 GB on: at most {limit})"
    return f"(target: at most {limit}; {'met' if found <= limit else 'MISSED'})"


if __name__ == "__main__":
    main()
