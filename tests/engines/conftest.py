"""The engines' environments, or the reason why their tests are skipped; and gpusync installed for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from engines import vllm_environment

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "gpusync", "kernels")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    if os.environ.get("GPUSYNC_SKIP_ENGINES", "") not in ("", "0"):
        pytest.skip("GPUSYNC_SKIP_ENGINES is set")
    python = vllm_environment.find_python()
    if python is None:
        pytest.skip("no vLLM here: `python tests/engines/vllm_environment.py` installs it")
    return python


@pytest.fixture(scope="session")
def vllm_site(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with gpusync installed as for anybody: vLLM finds the plugin by its entry point."""
    return install_gpusync(vllm_python, tmp_path_factory)


def install_gpusync(python: Path, scratch: pytest.TempPathFactory) -> Path:
    tree, site = scratch.mktemp("tree"), scratch.mktemp("site")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tree / name)
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*pip, "--target", site, tree], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site
