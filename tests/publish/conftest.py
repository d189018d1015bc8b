"""A publisher's surroundings: a base checkpoint, a stream, and what was offered, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpusync.publish import StoredBytes
from support.checkpoints import Tensor


@pytest.fixture
def offer():
    """What a trainer offers for a state: the same bytes, as tensors."""

    def as_offers(state: Mapping[str, Tensor]) -> dict[str, StoredBytes]:
        return {name: StoredBytes(dtype=t.dtype, shape=t.shape, data=t.data) for name, t in state.items()}

    return as_offers


@pytest.fixture
def visible():
    """The names of all files below a source directory, to show that nothing is left."""

    def names(source: Path) -> list[str]:
        return sorted(str(path.relative_to(source)) for path in source.rglob("*")) if source.exists() else []

    return names
