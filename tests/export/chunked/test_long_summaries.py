"""A summary of many equal tokens is one of them, weighed by their number."""

import numpy as np
import pytest

from .test_summaries import DIM, HEADS, SETTINGS, SUMMARISERS

TOKENS = 1_048_576


@pytest.mark.parametrize("name", SETTINGS)
def test_a_million_equal_tokens_have_an_exact_summary(name: str) -> None:
    random = np.random.default_rng(0)
    width = HEADS if name == "AftConv" else DIM
    key = np.abs(random.normal(size=(1, 1, width))).astype(np.float32)
    value = random.normal(size=(1, 1, DIM)).astype(np.float32)
    one = SUMMARISERS[name].run({"key": key, "value": value})
    few = SUMMARISERS[name].run(
        {"key": np.repeat(key, TOKENS, 1), "value": np.repeat(value, TOKENS, 1)}
    )
    np.testing.assert_allclose(few["few_values"], one["few_values"], rtol=1e-4)
    found, before = few["few_keys"].astype(np.float64), one["few_keys"].astype(np.float64)
    if name.startswith("NormalizedLinearAttention"):
        # An inverse of the sum of features: elu's is the sum less one, relu's the sum.
        plus = 0 if name.endswith("relu") else 1
        counts = np.where(before > -1e30, (found + plus) / (before + plus), TOKENS)
    else:
        counts = np.where(before > -1e30, np.exp(found - before), TOKENS)
    np.testing.assert_allclose(counts, TOKENS, rtol=1e-4)
