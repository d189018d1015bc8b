"""`gpusync demo`: train, publish, pull, verify, and say what it cost.

Each sync publishes the same optimizer step to three streams, one per encoding, and pulls each into a local checkpoint
of its own. What was pulled is compared with the trainer's checkpoint bit for bit before a figure is printed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpusync import pull
from gpusync.demo.adamw import AdamWSettings
from gpusync.demo.checkpoints import check_equal, time_full_reload, write_checkpoint
from gpusync.demo.trainers import DecoderTrainer, NoiseTrainer, Trainer
from gpusync.errors import MirrorError
from gpusync.publish import CheckpointTensors, Publisher
from gpusync.stream import element_bytes, read_checkpoint, version_path

ENCODINGS = ("xor", "overwrite", "gpusync")

_HOW_TO_READ = (
    "pull: from the stream into the checkpoint on this host's disk, verified, in place, durable. full reload: every "
    "tensor of that checkpoint read once with safetensors, from the page cache, by an engine that does nothing else."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One sync through one encoding. `wire_bytes` are all files of the version, `reload_s` reads the whole checkpoint
    that was pulled; every pulled tensor was equal to the trainer's."""

    sync: int
    loss: float | None
    encoding: str
    elements_changed: int
    wire_bytes: int
    publish_s: float
    pull_s: float
    reload_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    model: str
    lr: float
    elements: int
    checkpoint_bytes: int
    rows: tuple[DemoRow, ...]
    seconds: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def run_demo(
    *,
    model_dir: Path | None = None,
    out: Console,
    work_dir: Path | None = None,
    steps: int = 3,
    lr: float = 1e-6,
    seed: int = 0,
) -> DemoResult:
    """Run `steps` syncs and print them to `out`.

    `model_dir` is a bf16 checkpoint to use in place of the small decoder (gradients are noise then). Everything is
    written under `work_dir`, which is kept and must be empty or absent; None takes a temporary directory. Needs room
    there for six checkpoints. Raises GpusyncError; a DigestMismatchError says that what was pulled is wrong.
    """
    began = time.perf_counter()
    settings = AdamWSettings(lr=lr)
    with _directory(work_dir) as work:
        with out.status("preparing the trainer"):
            trainer, base_dir = _open_trainer(model_dir, work, seed=seed, settings=settings)
        tensors = read_checkpoint(base_dir, follow_links=True).tensors.values()
        checkpoint_bytes = sum(tensor.nbytes for tensor in tensors)
        out.print(f"[bold]{escape(trainer.description)}[/bold]")
        out.print(f"AdamW, learning rate {lr:g}; checkpoint of {_megabytes(checkpoint_bytes)}")
        rows = _run_syncs(trainer, base_dir, work, steps=steps, out=out)
    result = DemoResult(
        model=trainer.description,
        lr=lr,
        elements=sum(tensor.nbytes // element_bytes(tensor.dtype) for tensor in tensors),
        checkpoint_bytes=checkpoint_bytes,
        rows=tuple(rows),
        seconds=time.perf_counter() - began,
    )
    out.print(_table(result))
    out.print(_HOW_TO_READ)
    out.print(_what_it_saved(result))
    out.print("Every tensor of every pull equals the trainer's, bit for bit.", style="green")
    return result


@contextlib.contextmanager
def _directory(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="gpusync-demo-") as temporary:
            yield Path(temporary)
        return
    work_dir.mkdir(parents=True, exist_ok=True)
    if any(work_dir.iterdir()):
        raise MirrorError("the demo's directory is not empty", path=work_dir)
    yield work_dir


def _open_trainer(model_dir: Path | None, work: Path, *, seed: int, settings: AdamWSettings) -> tuple[Trainer, Path]:
    """The trainer, and the checkpoint that the engines start from."""
    if model_dir is not None:
        return NoiseTrainer(read_checkpoint(model_dir, follow_links=True), seed=seed, settings=settings), model_dir
    trainer = DecoderTrainer(seed=seed, settings=settings)
    base_dir = work / "base"
    write_checkpoint(base_dir, trainer.export())
    return trainer, base_dir


def _run_syncs(trainer: Trainer, base_dir: Path, work: Path, *, steps: int, out: Console) -> list[DemoRow]:
    paths = [_Path.open(encoding, base_dir, work) for encoding in ENCODINGS]
    rows = []
    for sync in range(1, steps + 1):
        with out.status(f"sync {sync}: training"):
            loss = trainer.step()
            trained_dir = work / "trainer" / f"step_{sync:03d}"
            write_checkpoint(trained_dir, trainer.export())
        if loss is not None:
            out.print(f"step {sync}: loss {loss:.3f}")
        for path in paths:
            with out.status(f"sync {sync}: {path.encoding}"):
                rows.append(path.sync(sync, trained_dir, loss=loss))
        shutil.rmtree(trained_dir)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """One encoding's way from the trainer to a local checkpoint."""

    encoding: str
    base_dir: Path
    source_dir: Path
    local_dir: Path
    publisher: Publisher

    @classmethod
    def open(cls, encoding: str, base_dir: Path, work: Path) -> _Path:
        source_dir, local_dir = work / encoding / "stream", work / encoding / "local"
        publisher = Publisher(source_dir, base_dir=base_dir, encoding=encoding)
        pull(local_checkpoint_dir=local_dir, base_dir=base_dir, source_dir=source_dir, target_version=0)
        return cls(
            encoding=encoding, base_dir=base_dir, source_dir=source_dir, local_dir=local_dir, publisher=publisher
        )

    def sync(self, version: int, trained_dir: Path, *, loss: float | None) -> DemoRow:
        began = time.perf_counter()
        self.publisher.publish(CheckpointTensors(trained_dir), version=version)
        published = time.perf_counter()
        report = pull(
            local_checkpoint_dir=self.local_dir,
            base_dir=self.base_dir,
            source_dir=self.source_dir,
            target_version=version,
        )
        pulled = time.perf_counter()
        check_equal(self.local_dir, trained_dir)
        return DemoRow(
            sync=version,
            loss=loss,
            encoding=self.encoding,
            elements_changed=report.elements_changed or 0,
            wire_bytes=sum(file.stat().st_size for file in version_path(self.source_dir, version).iterdir()),
            publish_s=published - began,
            pull_s=pulled - published,
            reload_s=time_full_reload(self.local_dir),
        )


def _table(result: DemoResult) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{len(ENCODINGS)} encodings of the same optimizer steps",
    )
    table.add_column("sync", no_wrap=True)
    table.add_column("encoding", no_wrap=True)
    for heading in ("elements\nchanged", "wire\nbytes", "of check-\npoint", "publish", "pull", "full\nreload"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            str(row.sync) if row.encoding == ENCODINGS[0] else "",
            row.encoding,
            f"{row.elements_changed / result.elements:.2%}",
            f"{row.wire_bytes:,}",
            f"{row.wire_bytes / result.checkpoint_bytes:.2%}",
            *(f"{seconds:.3f} s" for seconds in (row.publish_s, row.pull_s, row.reload_s)),
            end_section=row.encoding == ENCODINGS[-1],
        )
    return table


def _what_it_saved(result: DemoResult) -> str:
    """By the encoding that needed the fewest bytes, and when that matters."""
    totals = {name: sum(row.wire_bytes for row in result.rows if row.encoding == name) for name in ENCODINGS}
    best = min(totals, key=lambda name: totals[name])
    syncs = sum(row.encoding == best for row in result.rows)
    full = result.checkpoint_bytes * syncs
    return (
        f"Saved: {best} put {_megabytes(totals[best])} on the wire in {syncs} sync{'' if syncs == 1 else 's'}, where "
        f"full checkpoints are {_megabytes(full)}: {totals[best] / full:.1%} of the bytes.\n"
        "That shows in time once the bytes cross a network, and with bigger models. The rival here is a reload from "
        "this host's warm page cache, which no network slows down."
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
