"""The portable ONNX body of every operator against the reference in float64."""

from itertools import product

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import fewer

from aftexport.operators.domain import DOMAIN

from .cases import (
    BOUND,
    CASES,
    FEW,
    ONE_GATE,
    PAIRS,
    VARIANTS,
    Case,
    Variant,
    error,
    make_inputs,
    named,
    run_reference,
    truth,
)
from .portable import body_model, run_portable
from .strategies import drawn_cases, hard_inputs


@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_body_uses_only_standard_operators(variant: Variant, opset: int) -> None:
    model = body_model(variant, opset=opset)
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    assert (function.domain, function.name) == (DOMAIN, variant.op_type)
    assert {o.domain: o.version for o in function.opset_import} == {"": opset}
    assert all(node.domain == "" for node in function.node)


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(**named(PAIRS))
def test_the_body_equals_the_reference(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    result = run_portable(variant, inputs, case.heads)
    assert result.dtype == np.float32
    assert error(result, truth(variant, case), inputs) < BOUND["float32"]


OTHER_OPSETS = [c for c in CASES if c.tokens <= 65]


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize(**named(list(product(ONE_GATE, OTHER_OPSETS))))
def test_the_body_is_right_in_every_opset(variant: Variant, case: Case, opset: int) -> None:
    inputs = make_inputs(variant.operator, case)
    result = run_portable(variant, inputs, case.heads, opset)
    assert error(result, truth(variant, case), inputs) < BOUND["float32"]


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize(**named(list(product(ONE_GATE, FEW))))
def test_float16_goes_in_and_out_of_the_body(variant: Variant, case: Case, opset: int) -> None:
    expected = truth(variant, case, "float16")
    if np.abs(expected).max() > np.finfo(np.float16).max:
        pytest.skip("the right answer is beyond float16")
    inputs = make_inputs(variant.operator, case, "float16")
    result = run_portable(variant, inputs, case.heads, opset)
    assert result.dtype == np.float16
    assert error(result, expected, inputs) < BOUND["float16"]
    # Nothing but the last rounding is 16 bits wide.
    assert error(result, expected, inputs) < 2 * 2**-11


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=fewer(15), deadline=None, derandomize=True, database=None)
@given(case=drawn_cases())
def test_any_shape_and_range_matches_reference(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    expected = run_reference(variant, inputs, case.heads)
    assert error(run_portable(variant, inputs, case.heads), expected, inputs) < BOUND["float32"]


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
@settings(max_examples=fewer(30), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_huge_and_tiny_values_stay_finite(variant: Variant, data: st.DataObject) -> None:
    """Any mixture of huge and tiny values gives finite numbers."""
    inputs = data.draw(hard_inputs(variant))
    assert np.isfinite(run_portable(variant, inputs)).all()


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_batch_of_padding_stays_finite(variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("padding", 33, (0, 0), spread=100))
    assert np.isfinite(run_portable(variant, inputs)).all()
