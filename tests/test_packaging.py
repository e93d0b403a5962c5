"""Properties of the installed distribution."""

import re
import subprocess
import sys
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import pytest

import aftexport


@pytest.mark.parametrize("package", ["aftexport", "aftplugins", "aftserve"])
def test_package_has_type_marker(package: str) -> None:
    """Without ``py.typed`` (PEP 561) a user's type checker ignores the annotations."""
    assert files(package).joinpath("py.typed").is_file()


def test_metadata_matches_package() -> None:
    installed = metadata("aftexport")
    assert installed["Version"] == aftexport.__version__
    assert installed["License-Expression"] == "Apache-2.0"


def test_index_readme_has_no_relative_links() -> None:
    """A package index shows the README without the files around it."""
    words = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    folder = Path(__file__).parents[1]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert "## Mechanisms" in done.stdout
    assert re.findall(r"\]\((?!https?://)", done.stdout) == []
    assert "pip install 'aftexport[cpu]'" in done.stdout
    assert "<!--" not in done.stdout
