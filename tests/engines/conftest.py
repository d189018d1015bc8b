"""The engines' environments, or the reason why their tests are skipped; and gpusync installed for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from engines import sglang_environment, vllm_environment

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "gpusync", "kernels")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return find_python("sglang", sglang_environment)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    if os.environ.get("GPUSYNC_TEST_VLLM", "") in ("", "0"):
        pytest.skip("vLLM's servers are started when GPUSYNC_TEST_VLLM is set")
    return find_python("vLLM", vllm_environment)


@pytest.fixture(scope="session")
def sglang_site(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_gpusync(sglang_python, tmp_path_factory)


@pytest.fixture(scope="session")
def vllm_site(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_gpusync(vllm_python, tmp_path_factory)


def find_python(engine: str, environment: ModuleType) -> Path:
    if os.environ.get("GPUSYNC_SKIP_ENGINES", "") not in ("", "0"):
        pytest.skip("GPUSYNC_SKIP_ENGINES is set")
    python = environment.find_python()
    if python is None:
        script = Path(str(environment.__file__)).relative_to(ROOT)
        pytest.skip(f"no {engine} here: `python {script}` installs it")
    return Path(python)


def install_gpusync(python: Path, scratch: pytest.TempPathFactory) -> Path:
    """A directory with gpusync installed as for anybody: engines find the plugins by their entry points."""
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
