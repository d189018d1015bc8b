"""What the package may import: numpy alone on the host path, nothing of gpusync anywhere, triton in `device/` only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpusync_kernels

PACKAGE = Path(gpusync_kernels.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(str(node.module))
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_of_a_module(path):
    roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
    allowed = {"gpusync_kernels", "numpy", *sys.stdlib_module_names}
    if path.parent.name == "device":
        allowed |= {"torch", "triton"}
    if path.name.startswith("host_numba"):
        allowed |= {"llvmlite", "numba"}
    assert roots <= allowed


@pytest.mark.parametrize("path", [p for p in MODULES if p.parent == PACKAGE], ids=lambda path: path.name)
def test_the_device_is_reached_from_inside_functions_only(path):
    tree = ast.parse(path.read_text())
    at_import = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
    assert not any("device" in name.split(".") for name in imported(at_import))


def test_the_host_path_runs_without_torch_and_triton():
    program = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
import numpy as np
import gpusync_kernels as k
dst, src = np.arange(1025, dtype=np.uint32).view(np.uint8), np.ones(4100, np.uint8)
table = k.SegmentTable.flat(nbytes=4100)
layout = k.SumsLayout.of([4100])
bound = k.bind_sums(table, layout, dst=[dst], payload=[src])
print(k.hex_digests(k.chain_digests(layout, k.xor_block_sums(bound), k.gather_tails(bound)))[0])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.strip()) == 32
