"""`gpusync doctor`: what this machine offers, and what gpusync will use of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import click

from gpusync.cli.engine import read_engine
from gpusync.cli.output import json_option, print_json, printable
from gpusync.mirror import state
from gpusync.stream import filesystem_type, has_atomic_rename, is_local
from gpusync_kernels.host import host_ops, host_ops_reason

PACKAGES = (
    "gpusync", "numpy", "zstandard", "xxhash", "blake3", "safetensors", "torch", "triton", "nvidia-nvcomp-cu13",
    "nvidia-nvcomp-cu12", "cupy-cuda13x", "cupy-cuda12x", "numba", "sglang", "vllm",
)  # fmt: skip
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")

# one that cannot be read is a finding here, not wrong usage
DIRECTORY = click.Path(path_type=Path, readable=False)
Facts = dict[str, object]


@click.command("doctor")
@click.option("--local-checkpoint-dir", type=DIRECTORY, help="Look at this local checkpoint too.")
@click.option("--source-dir", type=DIRECTORY, help="Look at this stream's filesystem too.")
@click.option("--engine", metavar="URL", help="Ask this engine whether gpusync is on in it, and why not.")
@json_option
def doctor_command(
    local_checkpoint_dir: Path | None, source_dir: Path | None, engine: str | None, as_json: bool
) -> None:
    """Show what this machine offers, and what is used of it.

    Versions, devices and filesystems, and which backends are usable with the reason.
    """
    machine = _machine()
    found = {"machine": machine, "packages": _packages(), "backends": _backends(bool(machine["nvidia_devices"]))}
    if local_checkpoint_dir is not None:
        found["local_checkpoint"] = _local(local_checkpoint_dir)
    if source_dir is not None:
        found["stream"] = _stream(source_dir)
    if engine is not None:
        found["engine"] = read_engine(engine)
    if as_json:
        print_json(found)
        return
    for title, facts in found.items():
        click.echo(title.replace("_", " "))
        width = max(map(len, facts))
        for name, fact in facts.items():
            click.echo(f"  {name.replace('_', ' '):<{width}}  {printable(_fact_text(title, fact))}")


def _fact_text(title: str, fact: object) -> str:
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, list):
        return ", ".join(map(str, fact)) or "none"
    if fact is None:
        return "not installed" if title == "packages" else "unknown"
    return str(fact)


def _machine() -> Facts:
    gpus = sorted(path.name for path in NVIDIA_DEVICES.iterdir()) if NVIDIA_DEVICES.is_dir() else []
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "nvidia_devices": gpus,
    }


def _packages() -> Facts:
    versions: Facts = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _backends(has_device: bool) -> Facts:
    return {
        "host": "used: zstandard, numpy and xxhash on the CPU",
        "host_loops": f"{host_ops().name}: {host_ops_reason()}",
        "device": _device(has_device),
    }


def _device(has_device: bool) -> str:
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not usable: {' and '.join(missing)} not installed"
    if not has_device:
        return "not usable: no NVIDIA device; params on the CPU are patched by the host loops"
    nvcomp = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.nvcomp") is not None
    return f"used for params on CUDA devices: Triton applies, {'nvCOMP' if nvcomp else 'the host'} decodes frames"


def _local(directory: Path) -> Facts:
    control = directory / state.CONTROL_DIRECTORY
    known = state.read_state(control) if directory.is_dir() else None
    kind = filesystem_type(directory)
    return {
        **_directory(directory),
        "filesystem": kind,
        "usable_filesystem": is_local(kind),
        "version": None if known is None else known.version,
        "unfinished_move": (control / "journal.json").exists(),
    }


def _stream(directory: Path) -> Facts:
    kind = filesystem_type(directory)
    way = "temporary name and rename" if has_atomic_rename(kind) else "final names directly"
    return {**_directory(directory), "filesystem": kind, "files_are_written_by": way}


def _directory(path: Path) -> Facts:
    """What can be said without writing. What does not exist is writable where it could be made."""
    path = path.resolve()
    status = "exists" if path.is_dir() else "not a directory" if path.exists() else "does not exist"
    place = path
    while status == "does not exist" and not place.exists():
        place = place.parent
    return {
        "path": str(path),
        "directory": status,
        "writable": place.is_dir() and os.access(place, os.W_OK | os.X_OK),
    }
