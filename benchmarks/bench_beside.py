"""How long a thread that serves waits for Python's interpreter while a version is prepared, committed and folded.

The thread stands for an engine's loop: some Python, then a call into torch, which lets go of the interpreter, 40 times;
one such turn is a sample. In the same process a model of many small tensors, the hardest case for it, follows a
stream, as a rank that is the leader of its host does: `idle` is before, `fold` the local checkpoint behind the commit.
What was followed is compared with what was published at the end; a difference raises, and nothing is printed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
from harness import Report, emit
from scaling import RowShards, Scale, open_sync, publish, stored_tensors

from gpusync.stream import read_checkpoint

TENSOR_BYTES = 60_000
CHANGES = 76  # of each tensor, in a version
IDLE_S = 5.0
STEPS_OF_TURN = 40
PYTHON_NUMBERS = 1_500  # summed in a step: some tens of microseconds
COLUMNS = ("while", "wall s", "turns", "p50 ms", "p99 ms", "max ms")


@dataclass(slots=True)
class Serving:
    """`turns`: when each one began and how many seconds it took. `phases`: name, begin and end. A turn counts in each
    phase that it has a part in."""

    turns: list[tuple[float, float]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    stopping: bool = False

    @contextmanager
    def running(self) -> Iterator[Serving]:
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            self.stopping = True
            thread.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases.append((name, began, time.perf_counter()))

    def row(self, name: str) -> dict[str, object]:
        spans = [(began, ended) for each, began, ended in self.phases if each == name]
        found = [
            1e3 * took for at, took in self.turns if any(at < ended and at + took > began for began, ended in spans)
        ]
        figures = [float(np.percentile(found, percent)) for percent in (50, 99, 100)] if found else [None] * 3
        wall_s = sum(ended - began for began, ended in spans) / len(spans)
        return dict(zip(COLUMNS, (name, wall_s, len(found), *figures), strict=True))

    def _serve(self) -> None:
        torch.set_num_threads(1)  # of this thread: others of torch's would wait for cores, not for the interpreter
        left, right = torch.ones(128, 128), torch.ones(128, 128)
        while not self.stopping:
            began = time.perf_counter()
            for _ in range(STEPS_OF_TURN):
                sum(range(PYTHON_NUMBERS))
                torch.mm(left, right)
            self.turns.append((began, time.perf_counter() - began))


@click.command(help=__doc__)
@click.option("--tensors", default=4096, show_default=True, help=f"Of {TENSOR_BYTES:,} bytes, all changed.")
@click.option("--encoding", type=click.Choice(["xor", "overwrite", "gpusync"]), default="gpusync", show_default=True)
@click.option("--repeats", default=4, show_default=True, help="Measured versions, after one that is not.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="A directory on the filesystem to measure.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(tensors: int, encoding: str, repeats: int, work_dir: Path | None, as_json: bool, as_csv: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-beside-", dir=work_dir) as temporary:
        scale = Scale(nbytes=tensors * TENSOR_BYTES, changes=tensors * CHANGES, tensors=tensors)
        publish(Path(temporary), scale, encoding=encoding, versions=1 + repeats)
        serving = _follow(Path(temporary), repeats)
        report = Report(
            title=f"a thread beside {tensors:,} tensors",
            columns=COLUMNS,
            rows=[serving.row(name) for name in ("idle", "prepare", "commit", "fold")],
            notes=[
                f"wall s: of one; turns: all of {repeats} versions. Live weights were the published bytes at the end"
            ],
        )
        emit([report], directory=Path(temporary), as_json=as_json, as_csv=as_csv)


def _follow(work: Path, repeats: int) -> Serving:
    model = RowShards(read_checkpoint(work / "base"), rank=0, ranks=1)
    model.load_weights(stored_tensors(work / "base"))
    sync = open_sync(work, model)
    sync.pull(1)
    sync.flush()
    with Serving().running() as serving:
        with serving.phase("idle"):
            time.sleep(IDLE_S)
        for version in range(2, 2 + repeats):
            with serving.phase("prepare"):
                prepared = sync.prepare(version)
            with serving.phase("commit"):
                sync.commit(prepared)
            with serving.phase("fold"):
                sync.flush()
    sync.close()
    model.check(read_checkpoint(work / "now"))
    return serving


if __name__ == "__main__":
    main()
