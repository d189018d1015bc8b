"""The notebooks run, at toy size, and use what anybody may use. Their own asserts are their claims: bytes, equality,
numbers of operations; a time is never asserted. What is committed is their output at default size."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
TOY = {
    "01_a_stream_up_close": "elements = 1 << 16",
    "02_disk_path_and_live_path": "size, steps = 'toy', 2",
    "03_what_updates_look_like": "size, rates, steps = 'toy', (1e-6, 1e-5), 1",
}
MAX_LINES = 5
LIBRARIES = {"json", "matplotlib", "numpy", "pathlib", "safetensors", "shutil", "tempfile", "time", "torch"}


def read(name: str) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def plots(notebook: NotebookNode) -> int:
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_every_notebook_is_known() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == TOY.keys()


@pytest.mark.parametrize("name", TOY)
def test_it_runs_at_toy_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # The kernel and torch in it: threads that spin for one another take ten times as long beside other work.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(name)
    (parameters,) = [cell for cell in code_of(notebook) if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += f"\n{TOY[name]}"
    committed = plots(notebook)
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert plots(notebook) == committed
    assert not list(tmp_path.glob("gpusync-notebook-*")), "it leaves files behind"
    assert_what_it_tells(name, printed(notebook))


def assert_what_it_tells(name: str, text: str) -> None:
    if name.startswith("01"):
        for error in ("PayloadError", "VersionMissingError", "DigestMismatchError"):
            assert f"  {error}: " in text
        assert "the local checkpoint has not changed by one byte" in text
        assert "bit for bit: True" in text
    elif name.startswith("02"):
        assert "\nexact\n" in text
        sizes = dict(re.findall(r"(xor|overwrite|gpusync): ([\d.]+)% of the checkpoint", text))
        assert float(sizes["gpusync"]) < float(sizes["xor"]) < float(sizes["overwrite"]) < 5
    else:
        shares = [float(share) for share in re.findall(r"([\d.]+)% of [\d,]+ elements changed", text)]
        assert 0.1 < shares[0] < shares[-1] < 10


@pytest.mark.parametrize("name", TOY)
def test_what_is_committed_was_run_from_top_to_bottom_and_has_its_plots(name: str) -> None:
    cells = code_of(read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert plots(read(name)) >= 1
    assert_what_it_tells(name, printed(read(name)))
    assert "/tmp/" not in printed(read(name))
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 500_000


@pytest.mark.parametrize("name", TOY)
def test_it_uses_public_names_and_defines_nothing_long(name: str) -> None:
    for cell in code_of(read(name)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                body = [line for line in ast.unparse(node).splitlines() if line.strip()]
                assert len(body) - 1 <= MAX_LINES, node.name
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in LIBRARIES | {"gpusync"} for alias in node.names)
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] not in LIBRARIES:
                assert_public(str(node.module), [alias.name for alias in node.names])
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_") or node.attr == "__name__", node.attr


def assert_public(module: str, names: list[str]) -> None:
    assert module.split(".")[0] == "gpusync"
    assert not any(part.startswith("_") for part in [*module.split("."), *names])
    offered = getattr(importlib.import_module(module), "__all__", None)
    assert offered is None or set(names) <= set(offered)
