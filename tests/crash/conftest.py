"""A fork server for the directory's tests, and a disk that answers at once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.fork_server import ForkServer


@pytest.fixture(scope="session")
def processes() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no power is lost but in a model, or only a process dies, nothing has to wait for this machine's disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
