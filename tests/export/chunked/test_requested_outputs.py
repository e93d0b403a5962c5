"""A document in chunks computes only the requested outputs, and the evidence of chosen logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import several_heads
import tiny_models
import torch
from sampling import any_case, fewer

from aftexport.bundle.bundle import CHUNKED
from aftexport.bundle.chunked_plan import ChunkedPlan
from aftexport.capture.capture import capture
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import UsageError
from aftexport.lowering.evidence import add_evidence
from aftexport.lowering.to_onnx import lower
from aftexport.nn import HeadConfig, MultiHeadClassifier, MultiHeadConfig
from aftexport.system.contract import largest

TOKENS = fewer(300, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChunkedModel, ChunkedPlan]:
    path = tmp_path_factory.mktemp("requested") / CHUNKED
    program = capture(several_heads.Tokens().eval())
    plan = write_chunked(path, lower(program), precision="fp32")
    return ChunkedModel(path, plan, threads=1, chunk_tokens=32), plan


@pytest.mark.parametrize("outputs", [["topic"], ["tags"], ["hidden", "topic"]])
def test_outputs_are_those_of_all(
    model: tuple[ChunkedModel, ChunkedPlan], outputs: list[str]
) -> None:
    chunked, _ = model
    ids = np.arange(TOKENS) % several_heads.VOCABULARY
    every = chunked.run(ids)
    found = chunked.run(ids, outputs=outputs)
    assert found.keys() == set(outputs)
    for name in outputs:
        np.testing.assert_array_equal(found[name], every[name])
    stops = sum(1 for _ in chunked.parts(ids, outputs=outputs))
    assert chunked.count(TOKENS, outputs=outputs) == stops + 1


def test_rows_of_tokens_are_not_computed(model: tuple[ChunkedModel, ChunkedPlan]) -> None:
    chunked, plan = model
    assert plan.tokens.keys() == {"tags", "hidden"}
    chunks = -(-TOKENS // 32)
    assert chunked.count(TOKENS) - chunked.count(TOKENS, outputs=["topic"]) == chunks


def test_unknown_outputs_are_refused(model: tuple[ChunkedModel, ChunkedPlan]) -> None:
    chunked, _ = model
    with pytest.raises(UsageError, match="Expected outputs among hidden, tags, topic, got other"):
        chunked.run(np.arange(5), outputs=["other"])


EVIDENCE_TOKENS = 150


def classifier(mechanism: str, *, causal: bool, first_pooling: str = "mean") -> MultiHeadClassifier:
    torch.manual_seed(3)
    heads = {
        name: HeadConfig(problem_type=task, num_labels=several_heads.WIDTHS[name])
        for name, task in several_heads.TASKS.items()
    }
    heads["topic"] = replace(heads["topic"], pooling=first_pooling)
    settings = {name: value for name, value in tiny_models.CONFIG.items() if name != "num_labels"}
    settings |= {"mechanism": mechanism, "causal": causal, "depth": 2, "window": 4}
    return MultiHeadClassifier(MultiHeadConfig(**settings, heads=heads)).eval()


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize(
    ("mechanism", "causal"), [("aft_simple", False), ("aft_conv", True), ("fastformer", False)]
)
def test_every_logit_is_sum_of_its_evidence(mechanism: str, causal: bool, tmp_path: Path) -> None:
    model = classifier(mechanism, causal=causal)
    plan = write_chunked(tmp_path / CHUNKED, lower(capture(model)), precision="fp32")
    assert plan.evidence
    ids = np.arange(EVIDENCE_TOKENS) * 37 % tiny_models.VOCABULARY
    wide, length = model.double(), torch.tensor([EVIDENCE_TOKENS])
    with torch.inference_mode():
        expected = torch.cat([*wide(torch.from_numpy(ids)[None], length).values()], 1)[0]
        x = wide.encoder(wide.embedding(torch.from_numpy(ids)[None]), length)[0]
        added = torch.cat([x @ head.weight.T for head in wide.heads], 1).T / EVIDENCE_TOKENS
    offsets = torch.cat([head.bias for head in wide.heads])
    for chunk_tokens in (EVIDENCE_TOKENS, 64, 17):
        chunked = ChunkedModel(tmp_path / CHUNKED, plan, threads=1, chunk_tokens=chunk_tokens)
        for choice in ([5], [0, 4, 3], [largest(1), 2]):
            found = chunked.run(ids, evidence=choice)
            evidence = found["evidence"].reshape(len(choice), EVIDENCE_TOKENS)
            for one, number in zip(evidence, choice, strict=True):
                if number < 0:
                    number = 3 + int(expected[3:5].argmax())
                np.testing.assert_allclose(one, added[number], atol=1e-6)
                total = one.sum(dtype=np.float64) + offsets[number].item()
                assert total == pytest.approx(expected[number].item(), abs=1e-4)
            stops = sum(1 for _ in chunked.parts(ids, evidence=choice))
            assert chunked.count(EVIDENCE_TOKENS, evidence=choice) == stops + 1


def test_numbers_are_those_of_whole_graph(tmp_path: Path) -> None:
    """If chunks cannot explain the first head, they do not number the others in another way."""
    lowered = lower(capture(classifier("aft_simple", causal=False, first_pooling="attention")))
    explained = tuple(add_evidence(ir.from_proto(lowered)).offsets)
    assert explained == ("topic",)
    plan = write_chunked(tmp_path / CHUNKED, lowered, precision="fp32", explained=explained)
    assert not plan.evidence
    model = ChunkedModel(tmp_path / CHUNKED, plan, threads=1)
    with pytest.raises(UsageError, match="no evidence for documents in chunks"):
        model.run(np.arange(9), evidence=[1])
