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
from tiny_models import Applied
from torch import Tensor, nn

from aftexport.bundle.bundle import Bundle
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime.sessions import padded_choices
from aftexport.lowering.evidence import Explainable, NoEvidence, add_evidence
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import AftSimple, ClassifierConfig, DocumentClassifier
from aftexport.nn.config import MECHANISM_LAYERS
from aftexport.parity.run_cases import verify
from aftexport.pipeline.export import export
from aftexport.system.contract import EVIDENCE, EXPLAINED, largest
from aftexport.system.onnx_files import write_model

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


@pytest.mark.slow
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
    model = Applied(POOLS[pool][0], HEADS[head]()).eval()
    outputs, offsets = explained(model)
    with torch.no_grad():
        logits = model(IDS)
        added = POOLS[pool][1] * (model.embedding(IDS) @ model.head.weight.T)
    expected = added[torch.arange(3), :, logits.argmax(1)]
    np.testing.assert_allclose(outputs[EVIDENCE], expected, atol=1e-5)
    total = outputs[EVIDENCE].sum(1) + np.array(offsets)[logits.argmax(1)]
    np.testing.assert_allclose(total, logits.amax(1), atol=1e-4)


DECIDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: x.amax(1),
    "logarithm of a sum of powers": lambda x: x.logsumexp(1),
    "that of a mean": lambda x: (5 * x).logsumexp(1) / 5 - 0.6,
    "largest": lambda x: x.topk(min(3, x.shape[1]), 1).values.mean(1),
    "largest with rows behind": lambda x: (
        nn.functional.pad(x, (0, 0, 0, 3), value=-1e9).topk(3, 1).values.sum(1)
    ),
    "maximum without padding": lambda x: x.masked_fill(x[..., :1] < 0, -torch.inf).amax(1) / 2,
}


@pytest.mark.parametrize("pool", DECIDED)
def test_deciding_tokens_of_other_models(pool: str) -> None:
    torch.manual_seed(0)
    model = Applied(DECIDED[pool], nn.Linear(8, 3)).eval()
    outputs, offsets = explained(model)
    with torch.no_grad():
        logits = model(IDS)
    total = outputs[EVIDENCE].sum(1) + np.array(offsets)[logits.argmax(1)]
    np.testing.assert_allclose(total, logits.amax(1), atol=1e-5)


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize(
    ("pool", "head", "why"),
    [
        (lambda x: x.sum(1), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), "between"),
        (lambda x: x.sum(1), Scaled(), "the head ends in Div"),
        (lambda x: x.sum(1), OneNumber(), "not in one linear layer"),
        (lambda x: x.sum(1).tanh(), nn.Linear(8, 3), "Tanh"),
        (lambda x: x.sum(1) * x.sum(1), nn.Linear(8, 3), "one number per document"),
        (lambda x: x.amin(1), nn.Linear(8, 3), "ReduceMin"),
        (lambda x: x[:, 0], nn.Linear(8, 3), "between"),
        (lambda x: torch.cat([x, x], 1).sum(1), nn.Linear(8, 3), "does not sum the input"),
        (lambda x: x[..., 0].sum(1, keepdim=True), nn.Linear(1, 3), "does not sum the input"),
    ],
)
def test_evidence_obstacle_is_named(
    pool: Callable[[Tensor], Tensor], head: nn.Module, why: str
) -> None:
    graph = ir.from_proto(lower(capture(Applied(pool, head))))
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


WIDTHS = {"topic": 3, "flags": 4, "age": 1}
INPUTS = {"input_ids": IDS.numpy(), "lengths": LENGTHS.numpy()}
Pool = Callable[[Tensor, Tensor], Tensor]


def mean(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over each document's own tokens."""
    valid = torch.arange(x.shape[1]) < lengths[:, None]
    return (x * valid[..., None]).sum(1) / lengths[:, None]


class Heads(nn.Module):
    """Several heads of one encoder; ``flags`` has no bias, and the product of ``age`` is plain."""

    def __init__(self, flags_pool: Pool = mean, topic: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8)
        self.attention = AftSimple(8)
        self.topic = topic or nn.Linear(8, 3)
        self.flags = nn.Linear(8, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(8, 1))
        self.flags_pool = flags_pool

    def encode(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return x + self.attention(x, lengths)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = self.encode(input_ids, lengths)
        pooled = mean(x, lengths)
        flags = self.flags(self.flags_pool(x, lengths))
        return {"topic": self.topic(pooled), "flags": flags, "age": pooled @ self.weight + 0.5}


def written(
    model: nn.Module, folder: Path, *, dtype: torch.dtype = torch.float32
) -> tuple[OnnxRuntimeEngine, Explainable]:
    """Return an engine of the file of a model, and its heads with evidence."""
    graph = ir.from_proto(lower(capture(model, dtype=dtype)))
    found = add_evidence(graph)
    finished = finish(ir.to_proto(graph))
    onnx.checker.check_model(finished)
    write_model(folder, finished)
    return OnnxRuntimeEngine(folder / "model.onnx"), found


def by_heads(model: Heads) -> tuple[Tensor, Tensor]:
    """Return in float64 all logits ``[B, 8]``, and the part of each token ``[B, 8, T]``."""
    wide = model.double().eval()
    with torch.no_grad():
        x = wide.encode(IDS, LENGTHS)
        share = (torch.arange(23) < LENGTHS[:, None]) / LENGTHS[:, None]
        weights = torch.cat([wide.topic.weight, wide.flags.weight, wide.weight.T])
        logits = torch.cat([*wide(IDS, LENGTHS).values()], 1)
        return logits, torch.einsum("btd,ld,bt->blt", x, weights, share)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnnxRuntimeEngine, Explainable]:
    return written(Heads().eval(), tmp_path_factory.mktemp("heads"))


def test_every_logit_is_sum_of_its_evidence(engine: tuple[OnnxRuntimeEngine, Explainable]) -> None:
    """Each document of one batch has another choice, of any number of logits."""
    runs, found = engine
    logits, added = by_heads(Heads())
    offsets = np.concatenate([*found.offsets.values()])
    assert {name: len(one) for name, one in found.offsets.items()} == WIDTHS
    assert (runs.input_names, runs.takes_choice) == (("input_ids", "lengths"), True)
    for choices in ([[7], [0], [4]], [[*range(8)], [3, 1], [6]]):
        outputs = runs.run({**INPUTS, EXPLAINED: padded_choices(choices)})
        evidence = outputs[EVIDENCE].reshape(3, -1, 23)
        assert evidence.shape[1] == max(map(len, choices))
        for row, choice in enumerate(choices):
            for column, number in enumerate(choice):
                one = evidence[row, column]
                np.testing.assert_allclose(one, added[row, number], atol=1e-5)
                total = one.sum(dtype=np.float64) + offsets[number]
                assert total == pytest.approx(logits[row, number].item(), abs=1e-5)
                assert not one[LENGTHS[row] :].any()


def test_largest_logit_of_each_head(engine: tuple[OnnxRuntimeEngine, Explainable]) -> None:
    runs, _ = engine
    logits, added = by_heads(Heads())
    codes = [largest(place) for place in range(3)]
    outputs = runs.run({**INPUTS, EXPLAINED: padded_choices([codes] * 3)})
    evidence = outputs[EVIDENCE].reshape(3, 3, 23)
    first = 0
    for column, width in enumerate(WIDTHS.values()):
        chosen = first + logits[:, first : first + width].argmax(1)
        expected = added[torch.arange(3), chosen]
        np.testing.assert_allclose(evidence[:, column], expected, atol=1e-5)
        first += width
    without = runs.run(INPUTS)
    np.testing.assert_allclose(without[EVIDENCE], evidence[:, 0], atol=1e-6)
    np.testing.assert_array_equal(without["flags"], outputs["flags"])


def test_stock_session_explains_largest(
    engine: tuple[OnnxRuntimeEngine, Explainable], tmp_path: Path
) -> None:
    """Another runtime sees no further input, and the file as it was before choices existed."""
    import onnxruntime

    written(Heads().eval(), tmp_path)
    stock = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [one.name for one in stock.get_inputs()] == ["input_ids", "lengths"]
    outputs = dict(zip([o.name for o in stock.get_outputs()], stock.run(None, INPUTS), strict=True))
    expected = engine[0].run(INPUTS)
    assert outputs[EVIDENCE].shape == (3, 23)
    np.testing.assert_allclose(outputs[EVIDENCE], expected[EVIDENCE], atol=1e-6)


def test_evidence_of_linked_model(tmp_path: Path) -> None:
    folder, linked = tmp_path / "real", tmp_path / "linked"
    folder.mkdir()
    linked.mkdir()
    written(Heads().eval(), folder)
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    engine = OnnxRuntimeEngine(linked / "model.onnx")
    logits, added = by_heads(Heads())
    outputs = engine.run({**INPUTS, EXPLAINED: padded_choices([[5]] * 3)})
    np.testing.assert_allclose(outputs[EVIDENCE], added[:, 5], atol=1e-5)
    np.testing.assert_allclose(outputs["flags"], logits[:, 3:7], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_models_take_choices(dtype: torch.dtype, tmp_path: Path) -> None:
    engine, found = written(Heads().eval(), tmp_path, dtype=dtype)
    outputs = engine.run({**INPUTS, EXPLAINED: padded_choices([[1], [7], [3]])})
    logits = np.concatenate([outputs[name] for name in WIDTHS], 1).astype(np.float64)
    offsets = np.concatenate([*found.offsets.values()])
    total = outputs[EVIDENCE].sum(1) + offsets[[1, 7, 3]]
    np.testing.assert_allclose(total, logits[[0, 1, 2], [1, 7, 3]], atol=3e-2)


def test_heads_of_other_sums_are_refused(tmp_path: Path) -> None:
    engine, found = written(Heads(lambda x, lengths: x.sum(1)).eval(), tmp_path)
    assert [*found.offsets] == ["topic", "age"]
    assert found.refused == {"flags": "it pools the tokens in another way than topic"}
    outputs = engine.run({**INPUTS, EXPLAINED: padded_choices([[3]] * 3)})
    total = outputs[EVIDENCE].sum(1) + found.offsets["age"][0]
    np.testing.assert_allclose(total, outputs["age"][:, 0], atol=1e-5)


def test_head_that_is_not_linear_is_skipped(tmp_path: Path) -> None:
    """The first head with evidence is explained without a choice."""
    topic = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    engine, found = written(Heads(topic=topic).eval(), tmp_path)
    assert [*found.offsets] == ["flags", "age"]
    assert found.refused.keys() == {"topic"}
    assert "between the sum over the tokens and the head" in found.refused["topic"]
    outputs = engine.run(INPUTS)
    total = outputs[EVIDENCE].sum(1)
    np.testing.assert_allclose(total, outputs["flags"].max(1), atol=1e-5)


def test_required_heads_are_all_or_none() -> None:
    graph = ir.from_proto(lower(capture(Heads(lambda x, lengths: x.sum(1)).eval())))
    before = ir.to_proto(graph).SerializeToString()
    with pytest.raises(NoEvidence, match="in another way than topic"):
        add_evidence(graph, ["topic", "flags"])
    assert ir.to_proto(graph).SerializeToString() == before


def test_engine_returns_requested_outputs(engine: tuple[OnnxRuntimeEngine, Explainable]) -> None:
    runs, _ = engine
    expected = runs.run(INPUTS)
    for outputs in (["topic"], ["flags", "age"]):
        found = runs.run(INPUTS, outputs=outputs)
        assert [*found] == outputs
        for name in outputs:
            np.testing.assert_array_equal(found[name], expected[name])
