"""`kernels/README.md`: its example runs, and it names every operation there is and every kernel's file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import gpusync_kernels

PACKAGE = Path(gpusync_kernels.__file__).parent
TEXT = (PACKAGE.parent / "README.md").read_text()


def test_the_example_runs():
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, np.ndarray] = {}
    exec(compile(program, "README.md", "exec"), names)
    changed = names["param"][512 : 512 + (4 << 20)]
    assert (changed == 1).all()
    assert not names["param"][:512].any()
    assert not names["param"][512 + (4 << 20) :].any()
    assert np.array_equal(names["scratch"], changed)


def test_every_operation_is_named():
    verbs = ("copy_", "xor_", "overwrite_", "keep_", "restore_", "sparse_", "write_", "apply_", "revert_", "read_")
    verbs += ("block_", "add_cut", "gather_", "chain_", "advance", "fingerprints", "adler32_partials", "cast_")
    operations = [name for name in gpusync_kernels.__all__ if name.startswith(verbs)]
    assert len(operations) >= 20
    assert [name for name in operations if f"`{name}`" not in TEXT] == []


def test_every_file_exists():
    for name in re.findall(r"`([a-z0-9_]+\.py)`", TEXT):
        assert (PACKAGE / name).exists() or (PACKAGE / "device" / name).exists(), name
