"""Properties of the installed distribution."""

from importlib.metadata import metadata
from importlib.resources import files

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
