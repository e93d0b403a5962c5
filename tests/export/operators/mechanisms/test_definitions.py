"""The definitions in PyTorch against the papers' formulas, and those in NumPy against PyTorch."""

import numpy as np
import pytest
from oracles.mechanisms import MECHANISMS

from aftexport.recognition.proof.definitions import definition

from .cases import (
    BOUND,
    PAIRS,
    VARIANTS,
    Case,
    Variant,
    by_hand,
    error,
    make_inputs,
    named,
    run_reference,
    truth,
)


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(**named(PAIRS))
def test_the_reference_is_the_papers_formula(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    formula = MECHANISMS[variant.operator.stem]
    expected = formula(inputs, causal=variant.causal, **variant.attributes(case.heads))
    assert error(truth(variant, case), expected, inputs) < BOUND["float64"]


def compute(variant: Variant, inputs: dict[str, np.ndarray], num_heads: int = 2) -> np.ndarray:
    with np.errstate(all="ignore"):
        return definition(variant.op_type, variant.attributes(num_heads))(*inputs.values())


@pytest.mark.table(keep=0.2, by=lambda variant, case: variant)
@pytest.mark.parametrize(**named(PAIRS))
def test_numpy_definition_equals_pytorch(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    found = compute(variant, inputs, case.heads)
    expected = run_reference(variant, inputs, case.heads)
    assert found.dtype == np.float64
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * scale)


def test_key_keeps_digits_beside_huge_bias() -> None:
    """A mask that is written as a large bias leaves the other numbers their digits."""
    variant = next(v for v in VARIANTS if v.op_type == "AftFull")
    bias = np.full((3, 3), -1e38, np.float32)
    tokens = {"query": [0, 0, 0], "key": [0, 1, 2], "value": [1, 2, 3]}
    inputs = by_hand((3,), **tokens, position_bias=bias)
    expected = run_reference(variant, inputs)
    np.testing.assert_allclose(compute(variant, inputs), expected, rtol=1e-12)
    weights = np.exp([0, 1, 2])
    np.testing.assert_allclose(expected[0, 0, 0], weights @ [1, 2, 3] / weights.sum() / 2)
