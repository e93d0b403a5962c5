"""Evidence: the part of each token in the logit of the predicted class."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.bundle.bundle import Bundle
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.evidence import NoEvidence, add_evidence
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.nn.config import MECHANISM_LAYERS
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export
from aftexport.system.contract import EVIDENCE

LENGTHS = torch.tensor([23, 1, 12])
IDS = torch.randint(20, (3, 23), generator=torch.Generator().manual_seed(0))


def classifier(mechanism: str, pooling: str = "mean") -> DocumentClassifier:
    torch.manual_seed(0)
    longest = 40 if mechanism == "aft_full" else None
    config = ClassifierConfig(
        mechanism=mechanism, vocab_size=20, num_labels=3, dim=16, depth=2, num_heads=2, ffn_dim=32,
        window=5, max_length=longest, pooling=pooling,
    )  # fmt: skip
    return DocumentClassifier(config).eval()


def explained(
    model: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, np.ndarray[Any, Any]], tuple[float, ...]]:
    """Return the outputs of a model with evidence, and its offsets."""
    graph = ir.from_proto(lower(capture(model, dtype=dtype)))
    offsets = add_evidence(graph).offsets["logits"]
    lowered = ir.to_proto(graph)
    onnx.checker.check_model(lowered)
    engine = OnnxRuntimeEngine(finish(lowered).SerializeToString())
    given = {"input_ids": IDS.numpy(), "lengths": LENGTHS.numpy()}
    return engine.run({name: given[name] for name in engine.input_names}), offsets


def by_definition(model: DocumentClassifier) -> tuple[Tensor, Tensor]:
    """Return float64 logits and the part of each token in the largest one, ``[B, T]``."""
    wide = model.double().eval()
    with torch.no_grad():
        x = wide.encoder(wide.embedding(IDS), LENGTHS)
        valid = torch.arange(IDS.shape[1]) < LENGTHS[:, None]
        if wide.config.pooling == "mean":
            share = valid / LENGTHS[:, None]
        else:
            share = wide.pooling.score(x)[..., 0].masked_fill(~valid, -torch.inf).softmax(1)
        added = share[..., None] * (x @ wide.head.weight.T)
        logits = added.sum(1) + wide.head.bias
        chosen = logits.argmax(1)
        return logits, added[torch.arange(3), :, chosen]


@pytest.mark.table(keep=0.25, by=lambda mechanism, pooling: mechanism)
@pytest.mark.parametrize("mechanism", MECHANISM_LAYERS)
@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_evidence_is_contribution_of_each_token(mechanism: str, pooling: str) -> None:
    model = classifier(mechanism, pooling=pooling)
    outputs, offsets = explained(model)
    logits, added = by_definition(model)
    np.testing.assert_allclose(outputs["logits"], logits, atol=1e-4)
    np.testing.assert_allclose(outputs[EVIDENCE], added, atol=1e-5)
    assert not outputs[EVIDENCE][1, 1:].any()
    np.testing.assert_allclose(offsets, model.head.bias.detach(), atol=1e-6)


def test_evidence_is_float32_for_any_model() -> None:
    model = classifier("aft_simple")
    outputs, offsets = explained(model, torch.float16)
    logits, evidence = outputs["logits"], outputs[EVIDENCE]
    assert (logits.dtype, evidence.dtype) == (np.float16, np.float32)
    chosen = logits.argmax(1)
    largest = evidence.sum(1) + np.array(offsets)[chosen]
    np.testing.assert_allclose(largest, logits[np.arange(3), chosen], atol=2e-3)


class Pooled(nn.Module):
    """Token ids to logits by some pooling and some head."""

    def __init__(self, pool: Callable[[Tensor], Tensor], head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.pool = pool
        self.head = head

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.embedding(input_ids)))
        return logits


class Scaled(nn.Module):
    """Logits divided by a temperature that depends on the document."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] / (1 + x[:, :1].abs())


class OneNumber(nn.Module):
    """No logits of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


HEADS: Mapping[str, Callable[[], nn.Module]] = {
    "Gemm": lambda: nn.Linear(8, 3),
    "no bias": lambda: nn.Linear(8, 3, bias=False),
}


POOLS: Mapping[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (lambda x: x.sum(1), 1.0),
    "quarter of the sum": (lambda x: 0.25 * x.sum(1), 0.25),
    "mean": (lambda x: x.mean(1), 1 / 23),
}


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("pool", POOLS)
def test_sums_of_other_models(head: str, pool: str) -> None:
    torch.manual_seed(0)
    model = Pooled(POOLS[pool][0], HEADS[head]()).eval()
    outputs, offsets = explained(model)
    with torch.no_grad():
        logits = model(IDS)
        added = POOLS[pool][1] * (model.embedding(IDS) @ model.head.weight.T)
    expected = added[torch.arange(3), :, logits.argmax(1)]
    np.testing.assert_allclose(outputs[EVIDENCE], expected, atol=1e-5)
    total = outputs[EVIDENCE].sum(1) + np.array(offsets)[logits.argmax(1)]
    np.testing.assert_allclose(total, logits.amax(1), atol=1e-4)


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    ("pool", "head", "why"),
    [
        (lambda x: x.sum(1), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), "between"),
        (lambda x: x.sum(1), Scaled(), "the head ends in Div"),
        (lambda x: x.sum(1), OneNumber(), "not in one linear layer"),
        (lambda x: x.sum(1).tanh(), nn.Linear(8, 3), "Tanh"),
        (lambda x: x.sum(1) * x.sum(1), nn.Linear(8, 3), "one number per document"),
        (lambda x: x.amax(1), nn.Linear(8, 3), "ReduceMax"),
        (lambda x: x[:, 0], nn.Linear(8, 3), "between"),
        (lambda x: torch.cat([x, x], 1).sum(1), nn.Linear(8, 3), "does not sum the input"),
    ],
)
def test_evidence_obstacle_is_named(
    pool: Callable[[Tensor], Tensor], head: nn.Module, why: str
) -> None:
    graph = ir.from_proto(lower(capture(Pooled(pool, head))))
    before = ir.to_proto(graph).SerializeToString()
    with pytest.raises(NoEvidence, match=why):
        add_evidence(graph)
    assert ir.to_proto(graph).SerializeToString() == before


def test_bundle_holds_and_checks_evidence(checkpoint_file: Path, tmp_path: Path) -> None:
    bundle = export(checkpoint_file, out=tmp_path / "model.bundle")
    assert bundle.manifest.evidence_heads is not None
    results = [r for r in verify(bundle) if r.subject == "evidence"]
    assert all(r.max_ulps < 1e6 for r in results)  # of float32, as the logits are
    assert len(results) == sum(case.subject == "model" for case in bundle.golden())
    assert all(result.passed for result in results)


def test_wrong_evidence_is_found(bundle_folder: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    manifest = bundle.manifest
    assert manifest.evidence_heads is not None
    moved = {"logits": tuple(offset + 0.1 for offset in manifest.evidence_heads["logits"])}
    wrong = replace(bundle, manifest=manifest.model_copy(update={"evidence_heads": moved}))
    found = [r for r in verify(wrong) if r.subject.startswith("evidence")]
    assert {r.subject for r in found} == {"evidence", "evidence in chunks"}
    assert not any(r.passed for r in found)
