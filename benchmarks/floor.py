"""What one xor delta costs at least: each part of the work timed by itself, one thread, buffers that exist already.

The parts run window by window over the bytes of a real version, so that each finds its input as warm as the real
thing could at best.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from harness import Timing

from gpusync.stream import Checkpoint, OpenFiles, PublishedVersion, read_checkpoint

Bytes = npt.NDArray[np.uint8]

WINDOW_BYTES = 4 << 20
PAGE_BYTES = 4096
PARTS = ("read the base", "decode zstd", "xor", "digest", "write the spool", "write in place", "fsync both")

_BUFFERS = np.ones(WINDOW_BYTES, np.uint8), np.ones(WINDOW_BYTES, np.uint8)


def measure_floor(base: Checkpoint, version: PublishedVersion, *, local_dir: Path, repeats: int) -> dict[str, Timing]:
    """Medians for each of PARTS. `local_dir` holds the version already: its pages get the bytes they have."""
    runs = [_run(base, version, local_dir) for _ in range(repeats)]
    return {
        part: Timing(
            wall_s=statistics.median(run.walls[part] for run in runs),
            cpu_s=statistics.median(run.cpus[part] for run in runs),
            runs=repeats,
        )
        for part in PARTS
    }


class _Clock:
    def __init__(self) -> None:
        self.walls = dict.fromkeys(PARTS, 0.0)
        self.cpus = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.walls[part] += time.perf_counter() - wall
        self.cpus[part] += time.thread_time() - cpu


def _run(base: Checkpoint, version: PublishedVersion, local_dir: Path) -> _Clock:
    clock = _Clock()
    local = read_checkpoint(local_dir)
    spool_path = local_dir / ".weight_sync" / "floor.spool"
    os.sync()
    targets = {name: os.open(local_dir / name, os.O_WRONLY) for name in {t.file for t in local.tensors.values()}}
    spool = os.open(spool_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with OpenFiles() as files:
            for name in version.tensors:
                at = local.tensors[name]
                for offset, new, changed in _windows(name, base, version, files, clock):
                    with clock("write the spool"):
                        os.write(spool, changed)
                    runs = _touched_runs(changed, at.offset + offset, new.nbytes)
                    with clock("write in place"):
                        for first, last in runs:
                            os.pwrite(targets[at.file], new[first:last], at.offset + offset + first)
        with clock("fsync both"):
            for descriptor in (spool, *targets.values()):
                os.fsync(descriptor)
    finally:
        for descriptor in (spool, *targets.values()):
            os.close(descriptor)
        spool_path.unlink()
    return clock


def _windows(
    name: str, base: Checkpoint, version: PublishedVersion, files: OpenFiles, clock: _Clock
) -> Iterator[tuple[int, Bytes, Bytes]]:
    """(offset, new bytes, compact form of what changed) of one tensor's windows."""
    nbytes = base.tensors[name].nbytes
    old, new = _BUFFERS
    digest = xxhash.xxh3_128()
    with version.open_payload(name, files) as payload, base.open_tensor(name, files) as source:
        compressed = np.empty(payload.nbytes, np.uint8)
        payload.read_into(0, compressed)
        frame = zstandard.ZstdDecompressor().stream_reader(compressed)
        for offset in range(0, nbytes, WINDOW_BYTES):
            before, after = old[: nbytes - offset], new[: nbytes - offset]
            with clock("read the base"):
                source.read_into(offset, before)
            with clock("decode zstd"):
                _fill(frame, after)
            changed = _compact(after, before)
            with clock("xor"):
                np.bitwise_xor(before, after, out=after)
            with clock("digest"):
                digest.update(after)
            yield offset, after, changed
    if digest.hexdigest() != version.tensors[name].checksum:
        raise SystemExit(f"the floor's own result for {name} is wrong: no figure is printed")


def _fill(frame: zstandard.ZstdDecompressionReader, buffer: Bytes) -> None:
    view = memoryview(buffer)
    while view:
        got = frame.readinto(view)
        if not got:
            raise SystemExit("a payload ended too early: no figure is printed")
        view = view[got:]


def _compact(delta: Bytes, before: Bytes) -> Bytes:
    """Positions and new words of the changed bf16 elements: six bytes each, as the mirror spools them."""
    words = delta.view(np.uint16)
    positions = np.flatnonzero(words)
    values = words[positions] ^ before.view(np.uint16)[positions]
    return np.concatenate([positions.astype(np.uint32).view(np.uint8), values.view(np.uint8)])


def _touched_runs(changed: Bytes, start: int, nbytes: int) -> list[tuple[int, int]]:
    """Ranges of the window, cut at page borders of the file, that hold a changed element; neighbours are one range."""
    positions = changed[: changed.nbytes // 6 * 4].view(np.uint32)
    pages = np.unique((start + 2 * positions.astype(np.int64)) // PAGE_BYTES)
    runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1) if pages.size else []
    return [
        (max(0, int(run[0]) * PAGE_BYTES - start), min(nbytes, (int(run[-1]) + 1) * PAGE_BYTES - start)) for run in runs
    ]
