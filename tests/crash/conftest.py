"""A fork server for the directory's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fork_server import ForkServer


@pytest.fixture(scope="session")
def processes() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
