"""Folders through which another user could replace a file of API keys."""

import os
from pathlib import Path

import pytest

from aftserve.api.api_keys import exposures

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="permission bits do not control access there"
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    return file


def test_private_file_is_not_exposed(keys: Path) -> None:
    assert list(exposures(keys)) == []


def test_open_folder_between_links_is_named(keys: Path, tmp_path: Path) -> None:
    """Any user could point the second link to another file."""
    between = tmp_path / "between"
    between.mkdir()
    between.chmod(0o777)
    (between / "second").symlink_to(keys)
    (tmp_path / "first").symlink_to(between / "second")
    (exposure,) = exposures(tmp_path / "first")
    assert f"every user may write the folder {between}" in exposure


def test_relative_links_are_followed(keys: Path, tmp_path: Path) -> None:
    between = tmp_path / "between"
    between.mkdir()
    between.chmod(0o777)
    (between / "second").symlink_to("../keys.toml")
    (tmp_path / "first").symlink_to("between/second")
    assert any(str(between) in exposure for exposure in exposures(tmp_path / "first"))
