"""`gpusync doctor`: what this machine offers, and what gpusync will use of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from gpusync.cli.output import json_option, print_json
from gpusync.mirror import state
from gpusync.stream import filesystem_type, has_atomic_rename, is_local

PACKAGES = (
    "gpusync", "numpy", "zstandard", "xxhash", "blake3", "safetensors", "torch", "triton", "nvidia-nvcomp-cu13",
    "nvidia-nvcomp-cu12", "cupy-cuda13x", "cupy-cuda12x", "numba", "sglang", "vllm",
)  # fmt: skip
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


@click.command("doctor")
@click.option("--local-checkpoint-dir", type=click.Path(path_type=Path), help="Look at this local checkpoint too.")
@click.option("--source-dir", type=click.Path(path_type=Path), help="Look at this stream's filesystem too.")
@json_option
def doctor_command(local_checkpoint_dir: Path | None, source_dir: Path | None, as_json: bool) -> None:
    """Print versions, devices and filesystems, and which backends are usable with the reason."""
    found = {"machine": _machine(), "packages": _packages(), "backends": _backends()}
    if local_checkpoint_dir is not None:
        found["local checkpoint"] = _local(local_checkpoint_dir)
    if source_dir is not None:
        found["stream"] = _stream(source_dir)
    if as_json:
        print_json(found)
        return
    for title, facts in found.items():
        table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
        for name, fact in facts.items():
            table.add_row(name, fact)
        Console().print(table)


def _machine() -> dict[str, str]:
    gpus = sorted(path.name for path in NVIDIA_DEVICES.iterdir()) if NVIDIA_DEVICES.is_dir() else []
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "NVIDIA devices": ", ".join(gpus) or "none",
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _backends() -> dict[str, str]:
    return {
        "host": "used: zstandard, numpy and xxhash on the CPU",
        "device": "not built yet: this version has the disk path only",
    }


def _local(directory: Path) -> dict[str, str]:
    kind = filesystem_type(directory)
    control = directory / state.CONTROL_DIRECTORY
    known = state.read_state(control)
    return {
        "path": str(directory.resolve()),
        "filesystem": f"{kind}: {'usable' if is_local(kind) else 'refused, not a local filesystem'}",
        "version": "unknown" if known is None else str(known.version),
        "unfinished move": "yes, the next pull completes it" if (control / "journal.json").exists() else "no",
    }


def _stream(directory: Path) -> dict[str, str]:
    kind = filesystem_type(directory)
    way = "temporary name and rename" if has_atomic_rename(kind) else "final names directly"
    return {"path": str(directory.resolve()), "filesystem": kind, "files are written by": way}
