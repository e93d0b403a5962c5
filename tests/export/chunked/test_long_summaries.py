"""A summary of many equal tokens is one token with their number as weight."""

import numpy as np
import pytest

from .test_summaries import DIM, HEADS, SETTINGS, SUMMARIZERS, WITH_HEADS

TOKENS = 1_048_576


@pytest.mark.parametrize("name", SETTINGS)
def test_million_equal_tokens_have_exact_summary(name: str) -> None:
    random = np.random.default_rng(0)
    width = HEADS if name in WITH_HEADS else DIM
    key = np.abs(random.normal(size=(1, 1, width))).astype(np.float32)
    value = random.normal(size=(1, 1, DIM)).astype(np.float32)
    one = SUMMARIZERS[name].run({"key": key, "value": value})
    few = SUMMARIZERS[name].run(
        {"key": np.repeat(key, TOKENS, 1), "value": np.repeat(value, TOKENS, 1)}
    )
    np.testing.assert_allclose(few["few_values"], one["few_values"], rtol=1e-4)
    counted = np.isfinite(one["few_keys"])
    assert np.array_equal(np.isfinite(few["few_keys"]), counted)
    found, before = (f["few_keys"][counted].astype(np.float64) for f in (few, one))
    if name.startswith("NormalizedLinearAttention"):
        # An inverse of the sum of features: elu's is the sum less one, that of others the sum.
        plus = 1 if SETTINGS[name]["feature_map"] == "elu" else 0
        is_zero = before == -plus  # the other channels of identity
        assert np.array_equal(found[is_zero], before[is_zero])
        counts = (found + plus)[~is_zero] / (before + plus)[~is_zero]
        assert counts.size >= DIM
    else:
        counts = np.exp(found - before)
    np.testing.assert_allclose(counts, TOKENS, rtol=1e-4)
