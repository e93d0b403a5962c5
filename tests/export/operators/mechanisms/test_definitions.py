"""The reference of every operator against formulas written out from the papers."""

import pytest
from oracles.mechanisms import MECHANISMS

from .cases import BOUND, PAIRS, Case, Variant, error, make_inputs, named, truth


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(**named(PAIRS))
def test_the_reference_is_the_papers_formula(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    formula = MECHANISMS[variant.operator.stem]
    expected = formula(inputs, causal=variant.causal, **variant.attributes(case.heads))
    assert error(truth(variant, case), expected, inputs) < BOUND["float64"]
