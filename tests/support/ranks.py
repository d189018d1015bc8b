"""Processes of a `torch.distributed` group over gloo, started anew for a scenario."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WAIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, size: int, port: int, root: Path, scenario: Callable[[Path, int], None], errors: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        scenario(root, rank)
    except BaseException:
        (errors / f"{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
    # Not by ending the interpreter: a thread of gloo that still has a tensor to let go of would abort the process then.
    os._exit(0)


def run_ranks(size: int, root: Path, scenario: Callable[[Path, int], None]) -> None:
    """Run `scenario(root, rank)` on `size` processes. Fails with their tracebacks."""
    errors = root / "errors"
    errors.mkdir()
    context = mp.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=_rank, args=(rank, size, port, root, scenario, errors)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
    told = "\n".join(path.read_text() for path in sorted(errors.iterdir()))
    assert [process.exitcode for process in processes] == [0] * size, told
