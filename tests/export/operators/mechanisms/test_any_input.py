"""The portable body and the torch op on any input: near the definition, or at least finite."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import fewer

from .cases import (
    BOUND,
    ONE_GATE,
    VARIANTS,
    Case,
    Inputs,
    Variant,
    error,
    make_inputs,
    run_reference,
    run_torch,
)
from .portable import run_portable
from .strategies import drawn_cases, hard_inputs

RUNS: dict[str, Callable[..., np.ndarray]] = {"body": run_portable, "torch op": run_torch}
both_forms = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@both_forms
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=fewer(30), deadline=None, derandomize=True, database=None)
@given(case=drawn_cases())
def test_any_shape_and_range_matches_reference(
    run: Callable[..., np.ndarray], variant: Variant, case: Case
) -> None:
    inputs: Inputs = make_inputs(variant.operator, case)
    expected = run_reference(variant, inputs, case.heads)
    assert error(run(variant, inputs, case.heads), expected, inputs) < BOUND["float32"]


@both_forms
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
@settings(max_examples=fewer(30), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_huge_and_tiny_values_stay_finite(
    run: Callable[..., np.ndarray], variant: Variant, data: st.DataObject
) -> None:
    """Any mixture of huge and tiny values gives finite numbers."""
    inputs = data.draw(hard_inputs(variant))
    assert np.isfinite(run(variant, inputs)).all()


@both_forms
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_batch_of_padding_stays_finite(run: Callable[..., np.ndarray], variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("padding", 33, (0, 0), spread=100))
    assert np.isfinite(run(variant, inputs)).all()
