"""The load of a bundle's model."""

from pathlib import Path

import pytest
from bundles import changed_manifest
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftserve.model.load import load_model
from aftserve.settings import Settings


def test_loose_tolerance_is_logged(bundle_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = Bundle.open(changed_manifest(bundle_copy, {"tolerance": 0.5}))
    load_model(bundle, Settings(bundles=[bundle_copy]), Console(quiet=True))
    assert "the tolerance of the bundle is 0.5, and the bound of fp32 is 0.0001" in caplog.text
