"""Evidence of chosen logits, of any head that is linear in the same sum over the tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime.sessions import padded_choices
from aftexport.lowering.evidence import Explainable, NoEvidence, add_evidence
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import AftSimple
from aftexport.system.contract import EVIDENCE, EXPLAINED, largest
from aftexport.system.onnx_files import write_model

WIDTHS = {"topic": 3, "flags": 4, "age": 1}
LENGTHS = torch.tensor([23, 1, 12])
IDS = torch.randint(20, (3, 23), generator=torch.Generator().manual_seed(0))
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
    model: nn.Module, folder: Path, *, is_external: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[OnnxRuntimeEngine, Explainable]:
    """Return an engine of the file of a model, and its heads with evidence."""
    graph = ir.from_proto(lower(capture(model, dtype=dtype)))
    found = add_evidence(graph)
    finished = finish(ir.to_proto(graph))
    onnx.checker.check_model(finished)
    write_model(folder, finished, max_bytes=1 if is_external else 1 << 30)
    assert (folder / "model.onnx.data").exists() is is_external
    return OnnxRuntimeEngine(folder / "model.onnx"), found


def by_definition(model: Heads) -> tuple[Tensor, Tensor]:
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


def test_every_logit_is_sum_of_its_evidence(
    engine: tuple[OnnxRuntimeEngine, Explainable],
) -> None:
    """Each document of one batch has another choice, of any number of logits."""
    runs, found = engine
    logits, added = by_definition(Heads())
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
    logits, added = by_definition(Heads())
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


@pytest.mark.parametrize("is_link", [False, True])
def test_weights_beside_the_model(is_link: bool, tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    engine, _ = written(Heads().eval(), folder, is_external=True)
    if is_link:
        linked = tmp_path / "linked"
        linked.mkdir()
        for file in folder.iterdir():
            (linked / file.name).symlink_to(file)
        engine = OnnxRuntimeEngine(linked / "model.onnx")
    logits, added = by_definition(Heads())
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
