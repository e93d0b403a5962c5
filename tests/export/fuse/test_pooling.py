"""Sums over the tokens are products of matrices."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from aftexport.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering import finish, lower
from aftexport.nn import ClassifierConfig, DocumentClassifier

DIM = 8


class Pooled(nn.Module):
    """Embedded tokens, pooled."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.embedding = nn.Embedding(50, DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.pool(self.embedding(input_ids)))


def reductions(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type.startswith("Reduce")]


def exported(module: nn.Module) -> onnx.ModelProto:
    program = capture(module.eval(), dtype=torch.float32, max_tokens=None)
    return finish(lower(program, opset=20))


def assert_pytorchs(module: nn.Module, model: onnx.ModelProto) -> None:
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1)
    for batch, tokens in ((1, 1), (1, 300), (3, 17)):
        given = {
            "input_ids": torch.arange(batch * tokens).reshape(batch, tokens) % 50,
            "lengths": torch.arange(batch) * 8 % tokens + 1,
        }
        expected = module(**given).detach().numpy()
        logits = engine.run({n: given[n].numpy() for n in engine.input_names})["logits"]
        np.testing.assert_allclose(logits, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_our_own_pooling(pooling: str) -> None:
    config = ClassifierConfig(
        mechanism="aft_simple", vocab_size=50, num_labels=3, dim=DIM, depth=1, pooling=pooling
    )
    module = DocumentClassifier(config)
    model = exported(module)
    assert reductions(model) == []
    assert_pytorchs(module, model)


@pytest.mark.parametrize(
    ("pool", "left"),
    [
        (lambda x: x.sum(1), []),
        (lambda x: x.mean(1), []),
        (lambda x: x.mean(1, keepdim=True).squeeze(1), []),
        (lambda x: (x * x.softmax(1)).sum(1), []),
        (lambda x: (x[..., :1].sigmoid() * x).sum(1), []),
        (lambda x: x.amax(1), ["ReduceMax"]),
        (lambda x: x.sum((1, 2))[:, None].expand(-1, DIM), ["ReduceSum"]),
        (lambda x: (x * x.mean(2, keepdim=True)).sum(1), ["ReduceMean"]),
    ],
)
def test_pooling_of_ones_own(pool: Callable[[Tensor], Tensor], left: list[str]) -> None:
    module = Pooled(pool)
    model = exported(module)
    assert reductions(model) == left
    assert_pytorchs(module, model)


@pytest.mark.parametrize(
    "pool",
    [lambda x: x[:, 5:].sum(1), lambda x: (x[:, 5:, :1].sigmoid() * x[:, 5:]).sum(1)],
    ids=["sum", "weighted"],
)
def test_documents_that_are_left_without_tokens_stay_as_many_and_have_a_sum_of_zero(
    pool: Callable[[Tensor], Tensor],
) -> None:
    module = Pooled(pool)
    model = exported(module)
    assert reductions(model) == []
    engine = OnnxRuntimeEngine(model.SerializeToString(), threads=1)
    # Longer ones first: their numbers are then in the memory that the empty sums get.
    for batch, tokens in ((3, 17), (1, 1), (2, 1), (2, 5), (3, 2), (2, 6), (3, 1)):
        ids = torch.arange(batch * tokens).reshape(batch, tokens) % 50
        lengths = torch.full((batch,), tokens)
        expected = module(ids, lengths).detach().numpy()
        given = {"input_ids": ids.numpy(), "lengths": lengths.numpy()}
        logits = engine.run({n: given[n] for n in engine.input_names})["logits"]
        assert logits.shape == expected.shape
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_mean_of_a_million_tokens_is_exact() -> None:
    module = Pooled(lambda x: x.mean(1))
    engine = OnnxRuntimeEngine(exported(module).SerializeToString(), threads=1)
    ids = torch.randint(50, (1, 1_000_000), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([1_000_000])
    logits = engine.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})["logits"]
    expected = module.double()(ids, lengths).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-6)
