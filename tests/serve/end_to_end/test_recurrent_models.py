"""Tiny models with recurrent layers, from the export to the answers of a server.

Qwen3.5 and Qwen3-Next are hybrids: their softmax attention needs the whole document.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import naive_linear_attention as naive
import numpy as np
import pytest
import recurrent_models as models
import transformers_folders as folders
from clients import http, metric
from naive_linear_attention import check_bundle
from numpy.typing import NDArray
from sampling import RUN_ALL, part_of
from servers import serving
from torch import Tensor

from aftexport.bundle.bundle import CHUNKED, PARITY, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.peak_memory import predict_memory
from aftexport.parity import TOLERANCES
from aftexport.pipeline.export import export

LONG = 65_536
"""Tokens of the long document."""
LONG_OF_HYBRIDS = LONG if RUN_ALL else 8_192
"""The same for hybrids, whose time grows with the square of the tokens."""
WHOLE = 2_000
"""Maximum tokens that a server runs whole, if the model can run in chunks."""
MIXED = (5, 130, 1, 64, 65, 63, 1_000)
"""Lengths of the documents of one request."""
_BATCHING = (
    "-c",
    """
import sys
from aftserve.cli import main
from aftserve.model.costs import CostModel

begin, batch = CostModel.__init__, CostModel.batch

def begin_with_batches(costs, *args, **settings):
    begin(costs, *args, **settings)
    costs.batch_tokens, costs.batch_documents = 1_000, 8

CostModel.__init__ = begin_with_batches
CostModel.batch = lambda costs, n, tokens: 1e-9 if n > 1 else batch(costs, n, tokens)
sys.exit(main())
""",
)
"""A server to which batches of up to 8 documents seem fast before it has measured any."""
BOUND = TOLERANCES["fp32"].bound
HYBRIDS = {
    "qwen3_5": ("Qwen3_5TextForSequenceClassification", models.qwen3_5_config),
    "qwen3_next": ("Qwen3NextForSequenceClassification", models.qwen3_next_config),
}
FACTORIES = {
    "mamba2": models.mamba2_classifier,
    "gla": naive.gla_classifier,
    "retnet": naive.retnet_classifier,
}
_KINDS = dict.fromkeys(HYBRIDS, "hybrid") | dict.fromkeys(("gla", "retnet"), "naive loop")
NAMES = part_of([*HYBRIDS, *FACTORIES], lambda name: (name, {_KINDS.get(name, name)}), keep=0.5)


@dataclass(frozen=True)
class Exported:
    """A bundle and its model, with a long document and its logits in one run of the engine."""

    bundle: Bundle
    logits_of: Callable[[Tensor, Tensor], Tensor]
    """The model in PyTorch, of ids and lengths, or of ids and their mask."""
    takes_mask: bool
    long: NDArray[np.int64]
    long_logits: NDArray[np.float32]


def document(bundle: Bundle, tokens: int) -> NDArray[np.int64]:
    vocabulary = bundle.manifest.vocab_size
    assert vocabulary is not None
    return np.random.default_rng(tokens).integers(1, vocabulary, tokens)


def logits_of_whole(bundle: Bundle, *documents: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Return the logits of documents, each alone in one run of the engine."""
    engine = OnnxRuntimeEngine(bundle.model_path, threads=1)
    inputs = ({"input_ids": ids[None], "lengths": np.array([ids.size])} for ids in documents)
    return [engine.run(given)["logits"][0] for given in inputs]


@pytest.fixture(scope="module", params=NAMES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    if name in HYBRIDS:
        class_name, config = HYBRIDS[name]
        settings = {"max_position_embeddings": LONG_OF_HYBRIDS, **folders.named(folders.LABELS)}
        model = folders.Logits(folders.save(folder / "model", class_name, config(**settings)))
        bundle = export(folder / "model", out=folder / "out")
        assert bundle.manifest.source["kind"].endswith(class_name)
    else:
        build = FACTORIES[name]
        model = build()
        bundle = export(factory=f"{build.__module__}:{build.__name__}", out=folder / "out")
    long = document(bundle, LONG_OF_HYBRIDS if name in HYBRIDS else LONG)
    (logits,) = logits_of_whole(bundle, long)
    return Exported(bundle, model, name in {*HYBRIDS, "mamba2"}, long, logits)


def test_bundle_equals_pytorch(exported: Exported) -> None:
    check_bundle(exported.bundle, exported.logits_of, masked=exported.takes_mask)
    parity = json.loads((exported.bundle.path / PARITY).read_text("utf-8"))
    assert parity["checked"]
    assert all(case["passed"] for case in parity["cases"])


def test_chunks_equal_whole_document(exported: Exported) -> None:
    bundle, plan = exported.bundle, exported.bundle.manifest.chunked
    assert plan is not None
    assert all(stage.recurrence or stage.keys for stage in plan.stages)
    model = ChunkedModel(bundle.path / CHUNKED, plan, threads=1, chunk_tokens=WHOLE)
    (found,) = model.run(exported.long)["logits"]
    scale = max(1.0, np.abs(exported.long_logits).max())
    assert np.abs(found - exported.long_logits).max() <= BOUND * scale


def scores(exported: Exported, logits: NDArray[np.float32]) -> dict[str, float]:
    answer = exported.bundle.manifest.heads["logits"].answer(logits.astype(np.float64))
    found: dict[str, float] = answer.scores  # type: ignore[attr-defined]
    return found


def answers(address: str, *documents: NDArray[np.int64]) -> list[dict[str, Any]]:
    body = {"input_ids": [ids.tolist() for ids in documents]}
    response = http.post(f"{address}/infer", json=body, timeout=300)
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    return results


def test_server_answers_equal_engine(exported: Exported, tmp_path: Path) -> None:
    bundle, plan = exported.bundle, exported.bundle.manifest.chunked
    # Before a server has measured long documents, it predicts too much time for them.
    options = ["--deadline-seconds", "3600"]
    if plan is not None:
        path, least = bundle.model_path, plan.token_bytes
        budget = predict_memory(path, fused=True, token_bytes=least).bytes_of(WHOLE)
        options += ["--memory-budget-mib", str(budget / (1 << 20))]
    short, long = [document(bundle, tokens) for tokens in MIXED], exported.long
    expected = [*logits_of_whole(bundle, *short), exported.long_logits]
    with serving(bundle.path, tmp_path / "log", *options, program=_BATCHING) as (address, _):
        limits = http.get(f"{address}/info").json()["limits"]
        runs = metric(address, "aftserve_run_documents_count")
        found = answers(address, *short)
        assert metric(address, "aftserve_run_documents_count") - runs < len(short)
        found += answers(address, long)
    assert limits["whole_tokens"] == (long.size if plan is None else WHOLE)
    assert limits["whole_only"] == bundle.manifest.whole_only
    for ids, result, logits in zip([*short, long], found, expected, strict=True):
        assert result["scores"] == pytest.approx(scores(exported, logits), abs=BOUND)
        assert result["tokens_used"] == ids.size
        assert not result["truncated"]
