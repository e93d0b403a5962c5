"""The session's server for tests of its connections."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def address(server: str, server_log: Path) -> Iterator[str]:
    """The session's server; the tests of a module must not make it log a traceback."""
    before = len(server_log.read_text("utf-8"))
    yield server
    assert "Traceback" not in server_log.read_text("utf-8")[before:]
