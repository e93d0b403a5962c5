"""The reference of every operator against formulas written out from the papers."""

import numpy as np
import pytest

from .cases import BOUND, PAIRS, Case, Variant, error, make_inputs, named, truth
from .definitions import DEFINITIONS


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(**named(PAIRS))
def test_the_reference_is_the_papers_formula(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    exact = {n: x.astype(np.float64) if n != "lengths" else x for n, x in inputs.items()}
    expected = DEFINITIONS[variant.operator.stem](
        exact,
        np.arange(case.tokens),
        **variant.attributes(case.heads),
        causal=variant.causal,
    )
    assert error(truth(variant, case), expected, inputs) < BOUND["float64"]
