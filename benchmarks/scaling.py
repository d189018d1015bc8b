"""A model of a chosen size whose versions change a chosen number of elements, followed both ways on one rank or more.

Random bf16 words in tensors of equal shape; a version flips the lowest bit of elements that lie evenly over the whole
model, so that every tensor changes: the hardest case for what should depend on the number of changes alone. Ranks hold
rows. What was followed is compared with what was published at the end; a difference raises, and no time is returned.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpusync import Publisher, WeightSync, pull
from gpusync.demo.checkpoints import check_equal
from gpusync.publish import CheckpointTensors
from gpusync.stream import Checkpoint, OpenFiles, TensorSpec, encode_header, read_checkpoint

COLUMNS = 256
MAX_RANKS = 4
FILE = "model.safetensors"
TIMES = ("pull_s", "reload_s", "prepare_s", "commit_s", "fingerprint_s", "pause_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`changes`: elements that each version changes. `chain`: versions that are taken at once."""

    nbytes: int
    changes: int
    tensors: int = 64
    chain: int = 1
    ranks: int = 1

    @property
    def rows(self) -> int:
        """Of one tensor; every rank holds as many of them."""
        return max(1, self.nbytes // (2 * COLUMNS * self.tensors * MAX_RANKS)) * MAX_RANKS

    @property
    def elements(self) -> int:
        return self.tensors * self.rows * COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """One target, taken both ways: wall seconds of this rank.

    `commit_s` is the pause with `verify="before"`; with "before+after" the same call also reads the changed tensors
    again, which takes `fingerprint_s`; `pause_s` is both, as a caller sees it. `operations`: calls that a commit makes
    one after another over the live params, each over all tensors (on a host, of one of several threads).
    """

    pull_s: float
    reload_s: float
    prepare_s: float
    commit_s: float
    fingerprint_s: float
    pause_s: float
    operations: int
    compact_bytes: int
    wire_bytes: int
    exchanged_bytes: int


def follow(work: Path, scale: Scale, *, encoding: str, repeats: int) -> Followed:
    """Publish, then follow with `scale.ranks` ranks: medians over `repeats` targets of the slowest rank each. `work` is
    empty, and is left so. The first target is not counted: it is the first look at the files."""
    publish(work, scale, encoding=encoding, versions=(1 + repeats) * scale.chain)
    if scale.ranks == 1:
        told = [follow_on_rank(work, scale, 0)]
    else:
        told = _on_ranks(work, scale)
    for path in list(work.iterdir()):
        shutil.rmtree(path)
    slowest = [
        {name: max(getattr(each, name) for each in of_target) for name in Followed.__slots__}
        for of_target in zip(*told, strict=True)
    ]
    measured = slowest[1:] or slowest
    medians: dict[str, Any] = {name: statistics.median(each[name] for each in measured) for name in Followed.__slots__}
    return Followed(**{name: value if name in TIMES else int(value) for name, value in medians.items()})


def publish(work: Path, scale: Scale, *, encoding: str, versions: int) -> None:
    """`base`, `stream`, and `now`, which holds what the newest version does."""
    write_base(work / "base", scale)
    shutil.copytree(work / "base", work / "now")
    publisher = Publisher(work / "stream", base_dir=work / "base", encoding=encoding)
    for version in range(1, versions + 1):
        change(work / "now", scale, seed=version)
        publisher.publish(CheckpointTensors(work / "now"))


def write_base(directory: Path, scale: Scale) -> None:
    directory.mkdir(parents=True)
    shape = (scale.rows, COLUMNS)
    specs = [
        TensorSpec(name=f"layer.{number:05d}.weight", dtype="BF16", shape=shape, nbytes=2 * scale.rows * COLUMNS)
        for number in range(scale.tensors)
    ]
    with (directory / FILE).open("wb") as file:
        file.write(encode_header(specs, {"format": "pt"}))
        for number, spec in enumerate(specs):
            file.write(np.random.default_rng([0, number]).bytes(spec.nbytes))


def change(directory: Path, scale: Scale, *, seed: int) -> None:
    """Flip the lowest bit of `changes` elements, one in each of as many equal parts of the model."""
    words = np.memmap(directory / FILE, np.uint16, "r+", offset=_header_bytes(directory / FILE, scale))
    part = scale.elements / scale.changes
    rng = np.random.default_rng([1, seed])
    for start in range(0, scale.changes, 1 << 20):
        numbers = np.arange(start, min(start + (1 << 20), scale.changes))
        words[((numbers + rng.random(numbers.size)) * part).astype(np.int64)] ^= 1
    words.flush()


def _header_bytes(path: Path, scale: Scale) -> int:
    return path.stat().st_size - 2 * scale.elements


class RowShards(torch.nn.Module):
    """This rank's rows of every tensor, each a param of its own.

    They lie in one block of memory, for which numpy asks the system for huge pages: a device's are as large.
    """

    def __init__(self, checkpoint: Checkpoint, *, rank: int, ranks: int) -> None:
        super().__init__()
        self.slices: dict[str, slice] = {}
        room = np.empty(sum(stored.nbytes for stored in checkpoint.tensors.values()) // ranks // 2, np.int16)
        for name, stored in checkpoint.tensors.items():
            rows = stored.shape[0] // ranks
            self.slices[name] = slice(rank * rows, (rank + 1) * rows)
            mine, room = np.split(room, [rows * COLUMNS])
            empty = torch.from_numpy(mine).view(torch.bfloat16).reshape(rows, COLUMNS)
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._param(name).copy_(tensor[self.slices[name]])

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError for the first tensor that is not the checkpoint's."""
        with OpenFiles() as files:
            for name, rows in self.slices.items():
                live = self._param(name).view(torch.uint8).numpy().reshape(-1)
                expected = np.empty(live.nbytes, np.uint8)
                with checkpoint.open_tensor(name, files) as source:
                    source.read_into(rows.start * 2 * COLUMNS, expected)
                if not np.array_equal(live, expected):
                    raise ValueError(f"live tensor {name} is wrong")

    def _param(self, name: str) -> torch.Tensor:
        return self._parameters[name.replace(".", "/")].data


def follow_on_rank(work: Path, scale: Scale, rank: int) -> list[Followed]:
    """Bring this rank to every `chain`-th version, on the live path and on the disk path; then compare both."""
    base = read_checkpoint(work / "base")
    live, rival = (RowShards(base, rank=rank, ranks=scale.ranks) for _ in range(2))
    live.load_weights(stored_tensors(work / "base"))
    group = dist.group.WORLD if scale.ranks > 1 else None
    sync = open_sync(work, live, group=group)
    versions = len(list((work / "stream").glob("weight_v*")))
    told = []
    for target in range(scale.chain, versions + 1, scale.chain):
        disk = _disk_path(work, rival, target=target, rank=rank, ranks=scale.ranks)
        told.append(_live_path(sync, target=target, disk=disk))
        sync.flush()
    sync.close()
    now = read_checkpoint(work / "now")
    for model in (live, rival):
        model.check(now)
    if rank == 0:
        for name in ("live", "disk"):
            check_equal(work / name, work / "now")
    return told


def open_sync(work: Path, live: RowShards, *, group: Any | None = None) -> WeightSync:
    """Of what `publish` wrote into `work`, with its local checkpoint there too."""
    return WeightSync(
        live,
        load_weights=live.load_weights,
        base_dir=work / "base",
        local_checkpoint_dir=work / "live",
        source_dir=work / "stream",
        group=group,
    )


def _disk_path(work: Path, rival: RowShards, *, target: int, rank: int, ranks: int) -> tuple[float, float]:
    """Seconds of the host's one pull, and of this rank's reload of all tensors."""
    began = time.perf_counter()
    if rank == 0:
        os.sync()
        began = time.perf_counter()
        pull(
            local_checkpoint_dir=work / "disk",
            base_dir=work / "base",
            source_dir=work / "stream",
            target_version=target,
        )
    pulled = time.perf_counter()
    if ranks > 1:
        dist.barrier()
    started = time.perf_counter()
    rival.load_weights(stored_tensors(work / "disk"))
    return (pulled - began if rank == 0 else 0.0), time.perf_counter() - started


def _live_path(sync: WeightSync, *, target: int, disk: tuple[float, float]) -> Followed:
    os.sync()
    began = time.perf_counter()
    prepared = sync.prepare(target)
    done = time.perf_counter()
    operations = 0 if prepared.update is None else max(map(len, prepared.update.lanes), default=0)
    before = dict(prepared.report.seconds)
    started = time.perf_counter()
    report = sync.commit(prepared)
    pause_s = time.perf_counter() - started
    if report.commit_path != "in place":
        raise ValueError(f"version {target} was not committed in place: {report.reason}")
    fingerprint_s = report.seconds["fingerprint"] - before["fingerprint"]
    return Followed(
        pull_s=disk[0],
        reload_s=disk[1],
        prepare_s=done - began,
        commit_s=pause_s - fingerprint_s,
        fingerprint_s=fingerprint_s,
        pause_s=pause_s,
        operations=operations,
        compact_bytes=report.compact_bytes,
        wire_bytes=report.wire_bytes,
        exchanged_bytes=report.exchanged_bytes,
    )


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As engines read a checkpoint: safetensors, file by file."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _on_ranks(work: Path, scale: Scale) -> list[list[Followed]]:
    """What every rank tells; each is a process. Raises what a rank raised, as torch wraps it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    mp.start_processes(_rank, args=(port, work, scale), nprocs=scale.ranks, start_method="spawn")
    told = work / "told"
    return [[Followed(**each) for each in json.loads((told / f"{n}.json").read_text())] for n in range(scale.ranks)]


def _rank(rank: int, port: int, work: Path, scale: Scale) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=scale.ranks)
    try:
        told = follow_on_rank(work, scale, rank)
    finally:
        dist.destroy_process_group()
    (work / "told").mkdir(exist_ok=True)
    (work / "told" / f"{rank}.json").write_text(json.dumps([asdict(each) for each in told]))
    # Not by ending the interpreter: a thread of gloo that still has a tensor to let go of would abort the process then.
    os._exit(0)


def slope(points: Iterable[tuple[float, float]]) -> float | None:
    """How y grows with x: the power of x, by least squares over logarithms; None for fewer than two points."""
    x, y = (np.log(np.array(values, float)) for values in zip(*points, strict=True))
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else None


Follow = Callable[[Scale], Followed]
