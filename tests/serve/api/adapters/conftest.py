"""One server of a model with a head of every kind, for the tests of all formats."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import serving


@pytest.fixture(scope="session")
def heads_server(heads_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that runs each document alone, so that answers have equal bits."""
    folder = tmp_path_factory.mktemp("adapters")
    options = ("--max-documents", "4", "--budget-tokens", "1", "--max-tokens", "2000")
    with serving(heads_bundle, folder / "log", *options) as (address, _):
        yield address
    assert "Traceback" not in (folder / "log").read_text("utf-8")


@pytest.fixture
def heads_client(heads_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=heads_server, timeout=60) as session:
        yield session
