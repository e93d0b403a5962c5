"""A folder of two bundles to change."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(bundle_folder: Path, other_bundle: Path, tmp_path: Path) -> Path:
    """A folder of bundles, a and b."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    shutil.copytree(bundle_folder, folder / "a.bundle")
    shutil.copytree(other_bundle, folder / "b.bundle")
    return folder
