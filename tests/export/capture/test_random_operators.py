"""The error for an operator that draws random numbers names it and the user's line."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.errors import TraceError
from aftexport.lowering.to_onnx import lower
from aftexport.pipeline.export import export

GENERATOR = torch.Generator().manual_seed(0)


class Drawing(tiny_models.Bag):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.function(x)
        return self.head(x.mean(1))


def of_own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return x + torch.randn(x.shape, generator=generator)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: x + torch.randn(x.shape, generator=GENERATOR),
    "randn ": of_own_generator,
    "randn  ": lambda x: x + torch.randn(16, generator=GENERATOR),
    "rand": lambda x: x + torch.rand(16),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randint": lambda x: x + torch.randint(0, 3, x.shape),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "uniform_": lambda x: x + torch.zeros_like(x).uniform_(generator=GENERATOR),
    "exponential_": lambda x: functional.gumbel_softmax(x),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "dropout": lambda x: functional.dropout(x, 0.5, training=True),
}


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", DRAWING)
def test_operator_and_line_are_named(name: str) -> None:
    said = (
        rf"draws random numbers \(aten\.{name.strip()}, .*test_random_operators\.py, line \d+, in "
        r".*\): a document must have the same scores"
    )
    with pytest.raises(TraceError, match=said) as refused:
        lower(capture(Drawing(DRAWING[name])))
    assert "self.training" in refused.value.remedy


def test_forward_with_own_seed_is_refused() -> None:
    """PyTorch then gives the same numbers every time, and a runtime gives others."""

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)

    with pytest.raises(TraceError, match=r"aten\.randn_like"):
        lower(capture(Drawing(seeded)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x, 0.5, training=False),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: (torch.rand(3), x)[1],
    ],
)
def test_deterministic_operator_is_lowered(function: Callable[[Tensor], Tensor]) -> None:
    lower(capture(Drawing(function)))


class OfPython(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mean(input_ids) * random.random())


class OfNumpy(tiny_models.Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mean(input_ids) * float(np.random.rand()))


@pytest.mark.parametrize("kind", [OfPython, OfNumpy])
def test_state_reveals_numbers_of_other_libraries(
    kind: type[tiny_models.Bag], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of their generators shows that NumPy or Python drew random numbers."""
    monkeypatch.setattr(tiny_models, "drawing", kind, raising=False)
    with pytest.raises(TraceError, match="draws random numbers in evaluation mode too"):
        export(factory="tiny_models:drawing", to="onnx", out=tmp_path / "out.bundle")
