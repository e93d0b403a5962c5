from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling import any_case
from tiny_models import Applied
from torch import Tensor, nn
from torch.nn import functional

from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower

_F32 = np.finfo(np.float32)
_POSITIVE = (
    0, 1e-45, 1e-40, float(_F32.tiny), 1e-30, 1e-20, 1e-10, 1e-7, 1e-5, 1e-3, 0.1, 0.3, 0.5, 0.7,
    0.9, 0.99, 1, 1.0001, 1.5, 2, 3, 4, 5, 7, 10, 15, 16, 17, 18, 19, 20, 21, 25, 30, 50, 80, 87,
    88, 89, 100, 103, 110, 300, 1e4, 1e10, 1e19, 1e30, float(_F32.max), np.inf,
)  # fmt: skip
NUMBERS = np.array([*sorted({sign * n for n in _POSITIVE for sign in (1, -1)}), np.nan], np.float32)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsigmoid": functional.logsigmoid,
    "logarithm of sigmoid": lambda x: torch.sigmoid(x).log(),
    "root of sigmoid": lambda x: torch.sigmoid(x) ** (1 / 16),
    "clamped sigmoid": lambda x: torch.sigmoid(x).clamp(min=1e-7).log(),
    "over sigmoid": lambda x: 1 / torch.sigmoid(x.clamp(min=-80)),
    "softplus": functional.softplus,
    "softplus with threshold": lambda x: functional.softplus(x, 2.0, 5.0),
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "log_ndtr": torch.special.log_ndtr,
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "logaddexp of equals": lambda x: torch.logaddexp(x, x),
    "logaddexp of opposites": lambda x: torch.logaddexp(x, -x),
    "logaddexp2": lambda x: torch.logaddexp2(x, torch.zeros_like(x)),
    "xlogy": lambda x: torch.xlogy(x, x),
    "xlog1py": lambda x: torch.special.xlog1py(x, x),
    "atan2": lambda x: torch.atan2(x, -torch.ones_like(x)),
    "atan2 of equals": lambda x: torch.atan2(x, x),
    "hypot of equals": lambda x: torch.hypot(x, x),
    "hypot with a unit": lambda x: torch.hypot(x, torch.ones_like(x)),
    "hypot with infinity": lambda x: torch.hypot(torch.full_like(x, torch.inf), x),
    "remainder": lambda x: torch.remainder(x, 3.0),
    "hardswish": functional.hardswish,
    "sinc": torch.sinc,
    "softsign": functional.softsign,
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": functional.mish,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "elu": functional.elu,
    "celu": lambda x: functional.celu(x, 2.0),
    "selu": functional.selu,
}
"""Kernels of ONNX Runtime, right to a unit of float32 beside 1, as activations need it."""


class Table(nn.Module):
    def __init__(self, functions: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(NUMBERS), 1)
        with torch.no_grad():
            self.embedding.weight[:, 0] = torch.from_numpy(NUMBERS)
        self.functions = functions

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[..., 0]
        return torch.stack([function(x) for function in self.functions], -1)


Results = dict[str, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Return the results of ONNX Runtime and of PyTorch in float32 and float64, from one export."""
    every = FUNCTIONS | SMOOTH
    module = Table(list(every.values())).eval()
    engine = OnnxRuntimeEngine(finish(lower(capture(module))).SerializeToString())
    ids = np.arange(len(NUMBERS))[None]
    served = engine.run({"input_ids": ids})["logits"][0]
    with torch.inference_mode():
        single = module(torch.from_numpy(ids))[0].numpy()
        double = module.double()(torch.from_numpy(ids))[0].numpy()
        # PyTorch's sigmoid is 1 or 0 where its logarithm is still a number.
        logarithm = functional.logsigmoid(torch.from_numpy(NUMBERS).double()).numpy()
        double[:, list(every).index("logarithm of sigmoid")] = logarithm
    return {
        name: (served[:, i].astype(float), single[:, i].astype(float), _in_range(double[:, i]))
        for i, name in enumerate(every)
    }


def _in_range(double: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.abs(double) > float(_F32.max), np.copysign(np.inf, double), double)


def _errors(numbers: NDArray[np.float64], double: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative errors, of subnormal numbers less strict; infinite where one is not finite."""
    with np.errstate(all="ignore"):
        error = np.abs(numbers - double) / (np.abs(double) + float(_F32.tiny))
        equal = (numbers == double) | (np.isnan(numbers) & np.isnan(double))
    return np.where(equal, 0.0, np.where(np.isfinite(error), error, np.inf))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_as_exact_as_pytorch(name: str, results: Results) -> None:
    served, single, double = results[name]
    bound = np.maximum(2 * _errors(single, double), 2e-5)
    outside = ~(_errors(served, double) <= bound)
    assert not outside.any(), [
        *zip(NUMBERS[outside], served[outside], double[outside], strict=True)
    ]


@pytest.mark.parametrize("name", SMOOTH)
def test_an_activation_is_right_to_float32(name: str, results: Results) -> None:
    served, _, double = results[name]
    np.testing.assert_allclose(served, double, rtol=1e-6, atol=2e-6)


def test_gate_keeps_sigmoid() -> None:
    model = finish(lower(capture(Table([torch.sigmoid, functional.silu]))))
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Sigmoid") == 1  # computed once
    assert "Reciprocal" not in operators


def test_gate_before_layer_keeps_sigmoid() -> None:
    class Gated(Table):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids).expand(-1, -1, 4)
            y = self.layer(torch.sigmoid(x) * x)
            return y / (y.square().mean(2, keepdim=True) + 1e-6).sqrt()

    gated = Gated([])
    gated.layer = nn.Linear(4, 4)
    operators = [node.op_type for node in finish(lower(capture(gated))).graph.node]
    assert "Sigmoid" in operators


def of_ones(weights: Tensor) -> Tensor:
    """Sum ``[B, T, D]`` over the tokens by a product with ones, to ``[B, D, 1]``."""
    return weights.transpose(1, 2) @ torch.ones_like(weights[..., :1])


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w.sum(1, keepdim=True),
    "mean": lambda w: w.mean(1, keepdim=True),
    "product": lambda w: of_ones(w).transpose(1, 2),
    "product with constants": lambda w: w @ torch.ones(w.shape[2], 1, dtype=w.dtype),
    "equation": lambda w: torch.einsum("btd,bte->bde", w, torch.ones_like(w)).mean(2)[:, None],
    "running sum": lambda w: w.cumsum(1),
    "maximum": lambda w: w.amax(1, keepdim=True),
    "norm": lambda w: w.norm(dim=1, keepdim=True),
    "norm of order 1": lambda w: w.norm(p=1, dim=1, keepdim=True),
}


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", SUMS)
def test_small_sigmoids_divided_by_sums(name: str) -> None:
    """The sigmoids are about 1e-13."""

    def divided(x: Tensor) -> Tensor:
        weights = torch.sigmoid(x - 30)
        return weights / SUMS[name](weights)

    weights = Applied(divided, width=4).eval()
    lowered = lower(capture(weights))
    ids = torch.arange(100).reshape(2, 50) % 50
    expected = weights.double()(ids).detach().numpy()
    for fuse in (True, False):
        engine = OnnxRuntimeEngine(finish(lowered, fuse=fuse).SerializeToString())
        served = engine.run({"input_ids": ids.numpy()})["logits"]
        np.testing.assert_allclose(served, expected, rtol=1e-5)


def test_integer_remainder_has_sign_of_divisor() -> None:
    class Hashed(Table):
        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.remainder(input_ids - 4, 3) + self.embedding(input_ids)[..., 0]

    engine = OnnxRuntimeEngine(finish(lower(capture(Hashed([])))).SerializeToString())
    ids = np.arange(1, 9)[None]
    expected = (ids - 4) % 3 + NUMBERS[ids]
    np.testing.assert_array_equal(engine.run({"input_ids": ids})["logits"], expected)
