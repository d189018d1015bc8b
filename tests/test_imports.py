"""Who may import whom: downwards only, and the heavy libraries only where they belong.

Read from the source, not by importing it, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Top to bottom. A module may import from the rows below its own; within a row only what PEERS allows. The package
# itself (its `__init__`, named "gpusync" here) offers the names of its own row to those above it.
ROWS = [
    ["__main__"],
    ["cli"],
    ["demo", "engines", "trainers", "endpoint"],
    ["gpusync"],
    ["sync", "disk", "publish"],
    ["mirror", "store"],
    ["layout", "verdict", "plan"],
    ["stream", "codec", "digest", "hooks", "metrics", "report", "progress", "beside", "helper"],
    ["errors"],
]
PEERS = {("stream", "digest"), ("sync", "disk"), ("store", "mirror"), ("engines", "endpoint")}
# Pure: they look at what they are given and read nothing.
ONLY_ERRORS = {"plan", "hooks", "report", "progress", "beside", "helper", "codec", "digest"}

# A library, and the only modules that may import it (also within functions).
HOMES = {
    "triton": ("gpusync_kernels",),
    "cupy": ("gpusync.codec.device",),
    "nvidia": ("gpusync.codec.device",),
    "sglang": ("gpusync.engines.sglang",),
    "vllm": ("gpusync.engines.vllm",),
    "fastapi": ("gpusync.endpoint",),
    "starlette": ("gpusync.endpoint",),
    "uvicorn": ("gpusync.endpoint",),
    "transformers": (),
    "numba": ("gpusync_kernels.host_numba", "gpusync_kernels.host_numba_check"),
}
# Engines are imported when an adapter is called, never when its module is.
ONLY_IN_FUNCTIONS = {"sglang", "vllm"}
# These run with numpy alone.
WITHOUT_TORCH = {
    "errors",
    "hooks",
    "report",
    "progress",
    "stream",
    "plan",
    "mirror",
    "disk",
    "demo",
    "cli",
    "endpoint",
    "beside",
    "helper",
}
# Host codecs too; a publisher takes numpy arrays and a digest pieces of them, so torch waits until they are given a
# tensor or a group.
TORCH_ONLY_IN_FUNCTIONS = {"codec", "digest", "publish", "gpusync"}


# Of the names that the package offers.
NEED_TORCH = {"WeightSync"}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    in_function: bool
    for_types: bool

    @property
    def unit(self) -> str:
        return _unit(self.importer)


def _modules() -> dict[str, Path]:
    found = {}
    for top, root in (("gpusync", ROOT), ("gpusync_kernels", ROOT / "kernels")):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _unit(module: str) -> str:
    """The part of the package a module belongs to: `gpusync.stream.header` is of `stream`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "gpusync" and len(parts) > 1 else parts[0]


def _imports() -> Iterator[Import]:
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _imports_below(tree, module, in_function=False, for_types=False)


def _imports_below(node: ast.AST, module: str, *, in_function: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, in_function, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module} imports relatively"
            for alias in child.names:
                member = f"{child.module}.{alias.name}"
                yield Import(module, member if member in MODULES else str(child.module), in_function, for_types)
        else:
            yield from _imports_below(
                child,
                module,
                in_function=in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef),
                for_types=for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)),
            )


IMPORTS = list(_imports())


def _row(unit: str) -> int:
    return next(number for number, units in enumerate(ROWS) if unit in units)


def _is_allowed(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in PEERS:
        return True
    if importer in ONLY_ERRORS:
        return imported == "errors"
    return _row(importer) < _row(imported)


def test_every_module_has_a_row():
    units = {_unit(module) for module in MODULES} - {"gpusync_kernels"}
    assert units - {unit for row in ROWS for unit in row} == set()


def test_imports_go_downwards_only():
    inner = [i for i in IMPORTS if i.imported.split(".")[0] == "gpusync" and i.unit != "gpusync_kernels"]
    # What the package offers it imports when it is asked for, wherever that is; type checkers have to see it.
    inner = [i for i in inner if not (i.importer == "gpusync" and i.for_types)]
    assert len(inner) > 50
    assert [f"{i.importer} -> {i.imported}" for i in inner if not _is_allowed(i.unit, _unit(i.imported))] == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("cli", "mirror", True),
        ("mirror", "stream", True),
        ("stream", "digest", True),
        ("digest", "stream", False),
        ("codec", "stream", False),
        ("codec", "digest", False),
        ("plan", "stream", False),
        ("mirror", "publish", False),
        ("stream", "plan", False),
        ("publish", "disk", False),
        ("disk", "gpusync", False),
        ("demo", "gpusync", True),
        ("errors", "hooks", False),
        ("engines", "endpoint", True),
        ("endpoint", "engines", False),
    ],
)
def test_the_arrows_are_the_ones_of_the_design(importer, imported, allowed):
    assert _is_allowed(importer, imported) is allowed


def test_the_kernels_import_nothing_of_gpusync():
    wrong = [i for i in IMPORTS if i.unit == "gpusync_kernels" and i.imported.split(".")[0] == "gpusync"]
    assert wrong == []


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_at_home(library):
    uses = [i for i in IMPORTS if i.imported.split(".")[0] == library and not i.for_types]
    away = [i.importer for i in uses if not any(f"{i.importer}.".startswith(f"{home}.") for home in HOMES[library])]
    assert away == []
    if library in ONLY_IN_FUNCTIONS:
        assert [i.importer for i in uses if not i.in_function] == []


def test_torch_is_imported_only_where_tensors_live():
    uses = [i for i in IMPORTS if i.imported.split(".")[0] == "torch" and not i.for_types]
    assert [i.importer for i in uses if i.unit in WITHOUT_TORCH] == []
    assert [i.importer for i in uses if i.unit in TORCH_ONLY_IN_FUNCTIONS and not i.in_function] == []


def test_everything_but_the_device_paths_imports_without_torch_and_the_engines():
    modules = [m for m in MODULES if _unit(m) in WITHOUT_TORCH | TORCH_ONLY_IN_FUNCTIONS and m != "gpusync.__main__"]
    blocked = ["torch", *HOMES]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "import gpusync\n"
        f"for name in set(gpusync.__all__) - {NEED_TORCH!r}: getattr(gpusync, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_kernels_directory_is_no_package():
    # A top-level package named `kernels` would shadow Hugging Face's, which transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "gpusync_kernels" / "__init__.py").exists()
