"""The load of a bundle's model, and its comparison with PyTorch."""

from pathlib import Path

import pytest
from bundles import changed_manifest
from rich.console import Console

import aftplugins
from aftexport.bundle.bundle import Bundle
from aftexport.engines.product_methods import forced_methods, usable_methods
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export
from aftplugins.methods import METHOD_VARIABLE
from aftserve.model.load import load_model
from aftserve.settings import Settings


def test_loose_tolerance_is_logged(bundle_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = Bundle.open(changed_manifest(bundle_copy, {"tolerance": 0.5}))
    load_model(bundle, Settings(bundles=[bundle_copy]), Console(quiet=True))
    assert "the tolerance of the bundle is 0.5, and the bound of fp32 is 0.0001" in caplog.text


@pytest.mark.skipif(
    aftplugins.library("onnxruntime") is None, reason="the fused kernels are not built"
)
def test_breach_names_inexact_method(
    checkpoint_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse = [name for name in usable_methods("int8") if name != "fp32"]
    if not coarse:
        pytest.skip("this processor has one method")
    quiet = Console(quiet=True)
    path = tmp_path / "model.bundle"
    bundle = export(checkpoint_file, precision="int8", out=path, console=quiet)
    with forced_methods(coarse):
        results = [result for result in verify(bundle) if result.subject == "model"]
    changed_manifest(path, {"tolerance": max(r.largest_error for r in results) / 2})
    settings = Settings(bundles=[path])
    monkeypatch.setenv(METHOD_VARIABLE, ",".join(coarse))
    model = load_model(Bundle.open(path), settings, quiet)
    assert model.breach is not None
    assert f"because of the method {model.methods[0].methods[0]} of this" in model.breach
    assert f"{METHOD_VARIABLE}=fp32" in model.remedy
    monkeypatch.setenv(METHOD_VARIABLE, "fp32")
    assert load_model(Bundle.open(path), settings, quiet).breach is None
