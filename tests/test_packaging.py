"""The wheel: what it holds, and that it lives beside Hugging Face's `kernels`, which transformers imports."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "gpusync", "kernels")


@pytest.fixture(scope="module", name="wheel")
def _wheel(tmp_path_factory) -> Path:
    # Built from a copy: a build leaves directories behind, which the next build would pick files from.
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--disable-pip-version-check", "--wheel-dir", str(out), str(tree)),
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", name="site")
def _site(wheel, tmp_path_factory) -> Path:
    """A directory with gpusync's wheel and Hugging Face's `kernels` package installed side by side."""
    site = tmp_path_factory.mktemp("site")
    _run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"),
        *("--target", str(site), str(wheel)),
    )
    theirs = importlib.metadata.distribution("kernels")
    package = Path(str(theirs.locate_file("kernels")))
    # Over whatever gpusync has put there: a `kernels` of ours would show in the test as files that are not theirs.
    shutil.copytree(package, site / "kernels", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_the_wheel_holds_both_packages_their_type_marks_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpusync", "gpusync_kernels"}
    assert {"gpusync/py.typed", "gpusync_kernels/py.typed"} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gpusync").rglob("*.py")}
    assert sources <= set(names)


@pytest.mark.parametrize("first_on_the_path", ["site", "repository"])
def test_kernels_is_hugging_faces_with_gpusync_installed_beside_it(site, first_on_the_path):
    # In a checkout, `kernels/` is on the path too; without an `__init__.py` it gives way to a real package.
    path = [str(site)] if first_on_the_path == "site" else [str(ROOT), str(site)]
    code = (
        f"import sys; sys.path[:0] = {path!r}\n"
        "import kernels, gpusync, gpusync_kernels, gpusync.stream, gpusync.disk\n"
        "assert callable(kernels.get_kernel)\n"
        "print(kernels.__file__, gpusync.__file__, gpusync_kernels.__file__, sep='\\n')\n"
    )
    places = [Path(line) for line in _run(sys.executable, "-c", code, cwd=site.parent).splitlines()]
    assert places[0] == site / "kernels" / "__init__.py"
    if first_on_the_path == "site":
        assert places[1:] == [site / "gpusync" / "__init__.py", site / "gpusync_kernels" / "__init__.py"]


def test_the_installed_command_answers(site):
    script = site / "bin" / "gpusync"
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(site)!r}); sys.argv = ['gpusync', '--help']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    told = _run(sys.executable, "-c", code, cwd=site.parent)
    assert all(command in told for command in ("publish", "pull", "verify", "inspect", "plan", "demo", "doctor"))


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
