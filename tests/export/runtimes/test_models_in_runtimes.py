"""Whole models and the graphs of their chunks in every ONNX runtime."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from onnx_runtimes import RUNTIMES, Arrays

from aftexport.capture.capture import PRECISIONS, capture
from aftexport.chunked import runner
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.nn.config import RECURRENT_LAYERS
from aftexport.parity import TOLERANCES
from aftexport.system.contract import EVIDENCE, EXPLAINED

CHUNKABLE = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "fastformer",
             "linear_attention", *RECURRENT_LAYERS)  # fmt: skip
MECHANISMS = ("aft_full", *CHUNKABLE)
TOKENS = (1, 7, 500)
CHUNK_TOKENS = {1: 1, 7: 6, 500: 150}

every_precision = pytest.mark.parametrize("precision", ["fp32", "fp16"])
every_runtime = pytest.mark.parametrize("runtime", RUNTIMES)
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])


def by_runtime(mechanism: str, causal: bool, precision: str, runtime: str) -> object:
    """Keep a case of each runtime."""
    return runtime


@cache
def model_of(mechanism: str, causal: bool, precision: str) -> DocumentClassifier:
    torch.manual_seed(1)
    settings = {"mechanism": mechanism, "causal": causal, "depth": 2, "window": 4}
    if mechanism == "aft_full":
        settings["max_length"] = max(TOKENS)
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings)).eval()
    return model.to(PRECISIONS[precision])


@cache
def lowered(mechanism: str, causal: bool, precision: str) -> onnx.ModelProto:
    model = model_of(mechanism, causal, precision)
    return lower(capture(model, dtype=PRECISIONS[precision]))


def document(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, tiny_models.CONFIG["vocab_size"], tokens)


def truth(mechanism: str, causal: bool, precision: str, ids: np.ndarray) -> np.ndarray:
    """Return the logits in float64, of the rounded weights."""
    exact = DocumentClassifier(model_of(mechanism, causal, precision).config).double().eval()
    exact.load_state_dict(model_of(mechanism, causal, precision).state_dict())
    with torch.inference_mode():
        return exact(torch.from_numpy(ids)[None], torch.tensor([ids.size])).numpy()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.table(keep=0.01, by=by_runtime)
@every_precision
@every_runtime
@causal_or_not
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_model_is_right_in_runtime(
    mechanism: str, causal: bool, precision: str, runtime: str
) -> None:
    """A batch of two documents, the second one padded."""
    model = finish(lowered(mechanism, causal, precision), precision=precision)
    run = RUNTIMES[runtime](model)
    for tokens in TOKENS:
        ids = document(tokens)
        short = ids[: tokens // 2 + 1]
        padded = np.pad(short, (0, tokens - short.size))
        lengths = np.array([tokens, short.size])
        found = run({"input_ids": np.stack([ids, padded]), "lengths": lengths})
        for row, one in zip(found["logits"], (ids, short), strict=True):
            expected = truth(mechanism, causal, precision, one)
            assert error(row[None], expected) < TOLERANCES[precision].bound


class RuntimeEngine:
    """A graph of an archive in one of the runtimes."""

    def __init__(self, model: onnx.ModelProto, runtime: str) -> None:
        self.input_names = [value.name for value in model.graph.input]
        self.takes_choice = EXPLAINED in self.input_names
        self._run = RUNTIMES[runtime](model)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        return self._run({name: inputs[name] for name in self.input_names})


def archive_in(runtime: str) -> type[OpenedArchive]:
    """Return the class of archives whose graphs run in ``runtime``."""
    engines: dict[str, RuntimeEngine] = {}

    class Archive(OpenedArchive):
        def engine(self, graph: str) -> RuntimeEngine:  # type: ignore[override]
            if graph not in engines:
                model = self._read(graph)
                self._weights.load(model)
                engines[graph] = RuntimeEngine(model, runtime)
            return engines[graph]

    return Archive


@pytest.mark.table(keep=0.01, by=by_runtime)
@every_precision
@every_runtime
@causal_or_not
@pytest.mark.parametrize("mechanism", CHUNKABLE)
def test_chunks_are_right_in_runtime(
    mechanism: str,
    causal: bool,
    precision: str,
    runtime: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits, and the evidence of the largest one as ONNX Runtime gives it."""
    path = tmp_path / "chunked.zip"
    plan = write_chunked(path, lowered(mechanism, causal, precision), precision=precision)
    own = runner.ChunkedModel(path, plan, threads=1, fused=False)
    monkeypatch.setattr(runner, "OpenedArchive", archive_in(runtime))
    model = runner.ChunkedModel(path, plan, threads=1)
    for tokens in TOKENS:
        ids = document(tokens)
        found = model.in_chunks_of(CHUNK_TOKENS[tokens]).run(ids, evidence=plan.evidence)
        expected = truth(mechanism, causal, precision, ids)
        assert error(found["logits"], expected) < TOLERANCES[precision].bound
        if plan.evidence:
            whole = own.run(ids, evidence=True)[EVIDENCE]
            assert error(found[EVIDENCE], whole) < TOLERANCES[precision].bound
