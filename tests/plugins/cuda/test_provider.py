"""Bundles of reduced precision in ONNX Runtime's provider cuda, on an emulated GPU."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from clients import http
from servers import serving

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import operator_paths
from aftexport.parity import TOLERANCES
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export

from . import emulated, emulated_provider

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))

MECHANISMS = ("aft_local", "aft_simple", "efficient_attention", "fastformer", "linear_attention")


@pytest.fixture(scope="module")
def library() -> Path:
    return emulated.build() / emulated_provider.LIBRARY


def exported(folder: Path, mechanism: str, precision: str = "fp16") -> Bundle:
    source = folder / f"{mechanism}.pt"
    model = tiny_models.classifier(mechanism)
    aftexport.save(source, model=model, labels=tiny_models.LABELS)
    return export(source, precision=precision, out=folder / f"{mechanism}.bundle")


@pytest.mark.table(keep=0.4)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_bundle_is_within_tolerance(
    mechanism: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden cases of the model, of each operator, and in chunks."""
    bundle = exported(tmp_path, mechanism)
    emulated_provider.use(library, monkeypatch)
    results = verify(bundle, provider="cuda")
    assert [result for result in results if not result.passed] == []
    assert {"model", "model in chunks"} <= {result.subject for result in results}
    paths = operator_paths(bundle.model_path, provider="cuda")
    assert "fused" in paths.values()
    assert paths["LayerNormFeedForward"] == "portable"


def test_server_answers_from_provider(library: Path, tmp_path: Path) -> None:
    """Whole documents, and one in chunks, as the CPU answers them."""
    bundle = exported(tmp_path, "aft_simple")
    documents = [[5, 6, 7], [9] * 40, [*range(256)] * 8]
    answers = {}
    for provider in ("cpu", "cuda"):
        log = tmp_path / f"{provider}.log"
        options = ("--provider", provider, "--memory-budget-mib", "0.1")
        program = emulated_provider.server_program(library)
        with serving(bundle.path, log, *options, program=program) as (address, _):
            info = http.get(f"{address}/info").json()
            assert (info["engine"], info["provider"]) == ("onnxruntime", provider)
            assert info["limits"]["whole_tokens"] < len(documents[-1])
            answer = http.post(f"{address}/infer", json={"input_ids": documents})
            assert answer.status_code == 200, answer.text
            answers[provider] = [result["scores"] for result in answer.json()["results"]]
    assert "LayerNormFeedForward" in log.read_text("utf-8")
    for here, there in zip(answers["cuda"], answers["cpu"], strict=True):
        names = sorted(there)
        np.testing.assert_allclose(
            [here[name] for name in names],
            [there[name] for name in names],
            rtol=0,
            atol=TOLERANCES["fp16"].bound,
        )
