"""Bundles of reduced precision in ONNX Runtime's provider cuda, on an emulated GPU."""

from pathlib import Path

import pytest
import tiny_models

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime.kernel_paths import operator_paths
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export

from . import emulated, emulated_provider

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))

MECHANISMS = ("aft_local", "aft_simple", "efficient_attention", "fastformer", "linear_attention")


@pytest.fixture(scope="module")
def library() -> Path:
    return emulated.build() / emulated_provider.LIBRARY


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_provider.use(library, monkeypatch)


def exported(folder: Path, mechanism: str, precision: str = "fp16") -> Bundle:
    source = folder / f"{mechanism}.pt"
    model = tiny_models.classifier(mechanism)
    aftexport.save(source, model=model, labels=tiny_models.LABELS)
    return export(source, precision=precision, out=folder / f"{mechanism}.bundle")


@pytest.mark.table(keep=0.4)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_bundle_is_within_tolerance(
    mechanism: str, tmp_path: Path, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden cases of the model, of each operator, and in chunks."""
    monkeypatch.undo()
    bundle = exported(tmp_path, mechanism)
    emulated_provider.use(emulated.build() / emulated_provider.LIBRARY, monkeypatch)
    results = verify(bundle, provider="cuda")
    assert [result for result in results if not result.passed] == []
    assert {"model", "model in chunks"} <= {result.subject for result in results}
    paths = operator_paths(bundle.model_path, provider="cuda")
    assert "fused" in paths.values()
    assert paths["LayerNormFeedForward"] == "portable"
