"""Sums over the tokens are sums of blocks' sums."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
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
    assert_pytorchs(module, exported(module))


def halves(x: Tensor) -> Tensor:
    """``[B, T, D]`` to ``[B, T, 2, D/2]``."""
    return x.unflatten(2, (2, DIM // 2))


def normalized(x: Tensor, axis: int = 1) -> Tensor:
    centered = x - x.mean(axis, keepdim=True)
    return centered / (centered.square().mean(axis, keepdim=True) + 1e-5).sqrt()


LONG_SUMS = {
    "sum": lambda x: x.sum(1) / x.shape[1],
    "mean": lambda x: x.mean(1),
    "mean that keeps the axis": lambda x: x.mean(1, keepdim=True).squeeze(1),
    "mean of the last axis": lambda x: x.transpose(1, 2).mean(-1),
    "mean of heads": lambda x: halves(x).transpose(1, 2).mean(2).flatten(1),
    "softmax of channels": lambda x: (x * x.softmax(1)).sum(1),
    "softmax of a score": lambda x: (x * x[..., :1].softmax(1)).sum(1),
    "softmax of heads": lambda x: (halves(x) * x[..., :2].softmax(1)[..., None]).sum(1).flatten(1),
    "softmax and a product": lambda x: (x[..., 0].softmax(-1)[:, None] @ x)[:, 0],
    "softmax and an equation": lambda x: torch.einsum("bt,btd->bd", x[..., 0].softmax(1), x),
    "weights": lambda x: (x[..., :1].sigmoid() * x).sum(1) / x[..., :1].sigmoid().sum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1) / x.shape[1] ** 0.5,
    "norm of order 1": lambda x: x.norm(p=1, dim=1) / x.shape[1],
    "logarithm of a sum of powers": lambda x: x.logsumexp(1),
    "logarithm that keeps the axis": lambda x: (x - x.logsumexp(1, keepdim=True)).mean(1),
    "logarithm of a sum over both": lambda x: x.logsumexp((1, 2))[:, None].expand(-1, DIM),
    "mean of tokens and channels": lambda x: x.mean((1, 2))[:, None].expand(-1, DIM),
    "sum of both that keeps the axes": lambda x: (
        x.sum((1, 2), keepdim=True)[:, 0].expand(-1, DIM) / x.shape[1]
    ),
    "norm of both": lambda x: (
        torch.linalg.vector_norm(x, dim=(1, 2))[:, None].expand(-1, DIM) / x.shape[1] ** 0.5
    ),
    "pool of a plane": lambda x: (
        nn.functional.adaptive_avg_pool2d(x[:, None], (1, 1)).flatten(1).expand(-1, DIM)
    ),
    "heads in the documents' axis": lambda x: (
        halves(x).transpose(1, 2).flatten(0, 1).mean(1).unflatten(0, (-1, 2)).flatten(1)
    ),
    "running mean": lambda x: x.cumsum(1)[:, -1] / x.shape[1],
}
CENTERED = {
    "variance": lambda x: x.var(1, unbiased=False),
    "variance of both": lambda x: x.var((1, 2), unbiased=False)[:, None].expand(-1, DIM),
    "moment": lambda x: (x.mean(1)[:, None] - x).pow(4).mean(1) * 1e4,
    "norm": lambda x: normalized(x).amax(1),
    "norm of the last axis": lambda x: normalized(x.transpose(1, 2), 2).amax(2),
}
OTHERS = {
    "maximum": lambda x: x.amax(1),
    "mean of channels": lambda x: (x * x.mean(2, keepdim=True)).sum(1),
    "pairs of tokens": lambda x: ((x @ x.transpose(1, 2)).softmax(1) @ x).mean(1),
}


@pytest.mark.table(keep=0.2, by=lambda name: name in LONG_SUMS)
@pytest.mark.parametrize("name", [*LONG_SUMS, *CENTERED, *OTHERS])
def test_pooling_of_ones_own(name: str) -> None:
    module = Pooled((LONG_SUMS | CENTERED | OTHERS)[name])
    assert_pytorchs(module, exported(module))


@pytest.mark.table(keep=0.34, by=any_case)
@pytest.mark.parametrize("name", LONG_SUMS)
def test_a_million_tokens_are_pooled_exactly(name: str) -> None:
    """Equal tokens, the worst case of a running sum, and nearly equal ones."""
    assert_million_pooled(LONG_SUMS[name], noise=1e-4, kinds=(1, 50))


@pytest.mark.parametrize("name", CENTERED)
def test_deviations_of_million_tokens_are_exact(name: str) -> None:
    """The tokens are nearly equal."""
    assert_million_pooled(CENTERED[name], noise=1e-2, kinds=(50,))


def assert_million_pooled(
    pool: Callable[[Tensor], Tensor], *, noise: float, kinds: tuple[int, ...]
) -> None:
    module = Pooled(pool)
    with torch.no_grad():
        factors = 1 + noise * torch.randn(50, DIM)
        module.embedding.weight.copy_(module.embedding.weight[:1] * factors)
        module.head.bias.zero_()
    engine = OnnxRuntimeEngine(exported(module).SerializeToString(), threads=1)
    module.double()
    for number in kinds:
        ids = torch.arange(1_048_576)[None] % number
        given = {"input_ids": ids, "lengths": torch.tensor([ids.shape[1]])}
        expected = module(**given).detach().numpy()
        logits = engine.run({n: given[n].numpy() for n in engine.input_names})["logits"]
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("number", [-np.inf, np.inf, np.nan])
def test_infinities_and_nan_pool_like_pytorch(number: float) -> None:
    def pool(x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return torch.cat([x.logsumexp(1, keepdim=True), mean, (x - mean)[:, :4]], 1)

    module = Pooled(pool)
    module.head = nn.Identity()
    with torch.no_grad():
        module.embedding.weight[3, :4] = number
        module.embedding.weight[:, 0] = number
    engine = OnnxRuntimeEngine(exported(module).SerializeToString(), threads=1)
    ids = torch.arange(3000)[None] % 50
    lengths = torch.tensor([3000])
    expected = module(ids, lengths).detach().numpy()
    given = {"input_ids": ids.numpy(), "lengths": lengths.numpy()}
    logits = engine.run({name: given[name] for name in engine.input_names})["logits"]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "pool",
    [lambda x: x[:, 5:].sum(1), lambda x: (x[:, 5:, :1].sigmoid() * x[:, 5:]).sum(1)],
    ids=["sum", "weighted"],
)
def test_emptied_documents_sum_to_zero(pool: Callable[[Tensor], Tensor]) -> None:
    """Documents that are left without tokens stay in the batch."""
    module = Pooled(pool)
    engine = OnnxRuntimeEngine(exported(module).SerializeToString(), threads=1)
    # Longer ones first: their numbers are then in the memory that the empty sums get.
    for batch, tokens in ((3, 17), (1, 1), (2, 1), (2, 5), (3, 2), (2, 6), (3, 1)):
        ids = torch.arange(batch * tokens).reshape(batch, tokens) % 50
        lengths = torch.full((batch,), tokens)
        expected = module(ids, lengths).detach().numpy()
        given = {"input_ids": ids.numpy(), "lengths": lengths.numpy()}
        logits = engine.run({n: given[n] for n in engine.input_names})["logits"]
        assert logits.shape == expected.shape
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_mean_of_million_tokens_is_exact() -> None:
    module = Pooled(lambda x: x.mean(1))
    engine = OnnxRuntimeEngine(exported(module).SerializeToString(), threads=1)
    ids = torch.randint(50, (1, 1_000_000), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([1_000_000])
    logits = engine.run({"input_ids": ids.numpy(), "lengths": lengths.numpy()})["logits"]
    expected = module.double()(ids, lengths).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-6)
