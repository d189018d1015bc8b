"""The engines' environments, or the reason why their tests are skipped; and gpusync installed for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from engines.sglang_environment import find_python

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "gpusync", "kernels")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    if os.environ.get("GPUSYNC_SKIP_ENGINES", "") not in ("", "0"):
        pytest.skip("GPUSYNC_SKIP_ENGINES is set")
    python = find_python()
    if python is None:
        pytest.skip("no sglang here: `python tests/engines/sglang_environment.py` installs it")
    return python


@pytest.fixture(scope="session")
def sglang_site(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with gpusync installed as for anybody: sglang finds the plugin by its entry point."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tree / name)
    pip = [sglang_python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*pip, "--target", site, tree], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site
