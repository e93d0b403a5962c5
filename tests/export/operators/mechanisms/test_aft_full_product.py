"""The operators around AFT-full's product, by their portable bodies, against float64."""

import numpy as np
import pytest
from aft_full_product import DTYPES, rounded, run_around_product

from aftexport.lowering.position_bias import MAX_RANGE
from aftexport.parity import TOLERANCES

from .cases import Inputs, error, run_reference, variant_of

SHAPES = {
    "one token": (1, 1, (1,)),
    "padded": (33, 5, (33, 20, 1)),
    "nothing counts": (7, 4, (7, 0, -3)),
    "blocks of kernels": (128, 64, (128, 65)),
    "longer bias": (131, 16, (131, 130)),
}
"""Tokens, channels and lengths."""


def inputs_of(
    tokens: int, channels: int, lengths: tuple[int, ...], precision: str, spare: int = 0
) -> Inputs:
    generator = np.random.default_rng(0)
    size = (len(lengths), tokens, channels)
    inputs = {name: generator.standard_normal(size) for name in ("query", "key", "value")}
    inputs["position_bias"] = generator.standard_normal((tokens + spare, tokens + spare))
    inputs = {name: rounded(x, precision) for name, x in inputs.items()}
    return inputs | {"lengths": np.array(lengths, np.int64)}


def check(inputs: Inputs, precision: str, gate: str = "sigmoid") -> None:
    result = run_around_product(inputs, precision, gate)
    expected = run_reference(variant_of("AftFull", gate=gate), inputs)
    assert error(result, expected, inputs) <= TOLERANCES[precision].bound


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_operators_equal_definition(shape: str, precision: str) -> None:
    check(inputs_of(*SHAPES[shape], precision, spare=3 if "longer" in shape else 0), precision)


@pytest.mark.parametrize("gate", ["tanh", "none", "relu"])
def test_gates(gate: str) -> None:
    check(inputs_of(*SHAPES["padded"], "fp32"), "fp32", gate)


@pytest.mark.parametrize("precision", DTYPES)
def test_range_at_edge_of_rule(precision: str) -> None:
    """The largest keys meet the smallest biases of their rows, the case that loses most."""
    inputs = inputs_of(70, 8, (70, 41), precision)
    reach = MAX_RANGE["bf16" if precision == "fp32" else precision]
    bias = np.random.default_rng(1).uniform(-reach, 0, (70, 70))
    bias[:, 0], bias[:, 1::7] = 0.0, -reach
    inputs["position_bias"] = rounded(bias, precision)
    inputs["key"][0, 1::7] = rounded(inputs["key"][0, 1::7] + reach, precision)
    check(inputs, precision)


def test_lost_products_are_computed_by_definition() -> None:
    """The largest key has the smallest bias, so the product is 0 for both others."""
    inputs = inputs_of(3, 1, (3,), "fp32")
    inputs["key"][0, :, 0] = [100, 0, -100]
    inputs["position_bias"][:] = [-100, 0, 100]
    check(inputs, "fp32", "none")


def test_infinite_products_are_computed_by_definition() -> None:
    inputs = inputs_of(64, 2, (64,), "fp16")
    inputs["key"][:] = 0
    inputs["position_bias"][:] = 0
    inputs["value"][:] = 4000
    assert run_around_product(inputs, "fp16", "none") == pytest.approx(4000.0)
