"""Linear attention where its normalizer is 0 or nearly so: every form gives the same numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_node import OneNode

from aftexport.operators.mechanisms.linear_attention import MIN_EPS

from .cases import (
    Inputs,
    Variant,
    variant_of,
)

HEADS, WIDTH = 2, 3
FORMS = [
    variant_of(op_type, feature_map=feature_map)
    for op_type in ("NormalizedLinearAttention", "CausalNormalizedLinearAttention")
    for feature_map in ("relu", "elu")
]
EPS = (0.0, 1e-45, 1e-30, MIN_EPS, 1e-15, 1e-6)
SIZES = st.sampled_from([-100.0, -1.0, 0.0, 1e-38, 1e-25, 1e-20, 1e-10, 1.0, 100.0])
"""Factors for the entries of a token; a negative factor makes all of them negative."""


def run(variant: Variant, inputs: Inputs, eps: float, *, kernel: bool) -> np.ndarray:
    attributes = variant.attributes(HEADS) | {"eps": eps}
    return OneNode.for_inputs(variant.op_type, attributes, inputs).run(inputs, kernel=kernel)[0]


def expected(variant: Variant, inputs: Inputs, eps: float) -> np.ndarray:
    """Compute the definition in float64, with the eps that float32 has."""
    *floats, lengths = (torch.from_numpy(x) for x in inputs.values())
    attributes = {**variant.attributes(HEADS), "eps": max(eps, MIN_EPS)}
    return variant.operator.reference(*(x.double() for x in floats), lengths, **attributes).numpy()


@st.composite
def inputs_of_all_sizes(draw: st.DrawFn) -> Inputs:
    """Draw tokens whose queries and keys are 0, negative, or many magnitudes apart."""
    tokens = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    inputs = {
        name: random.uniform(0.5, 2.0, (2, tokens, HEADS * WIDTH)).astype(np.float32)
        for name in ("query", "key", "value")
    }
    for name in ("query", "key"):
        sizes = draw(st.lists(SIZES, min_size=tokens, max_size=tokens))
        inputs[name] *= np.array(sizes, np.float32)[:, None]
    lengths = draw(st.lists(st.integers(0, tokens), min_size=2, max_size=2))
    return {**inputs, "lengths": np.array(lengths)}


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("variant", FORMS, ids=str)
@settings(max_examples=25, deadline=None)
@given(inputs=inputs_of_all_sizes())
def test_every_form_agrees(variant: Variant, eps: float, inputs: Inputs) -> None:
    definition = expected(variant, inputs, eps)
    assert np.isfinite(definition).all()
    found = [run(variant, inputs, eps, kernel=kernel) for kernel in (False, True)]
    if eps > 0.0:
        arguments = [torch.from_numpy(x) for x in inputs.values()]
        attributes = {**variant.attributes(HEADS), "eps": eps}
        found.append(variant.operator.torch_op(*arguments, *attributes.values()).numpy())
    for output in found:
        for document, length in enumerate(inputs["lengths"]):
            rows = slice(0, int(length) or None)  # of a document without keys every row is 0
            np.testing.assert_allclose(
                output[document, rows], definition[document, rows], rtol=2e-5, atol=2e-5
            )


@pytest.mark.parametrize("variant", FORMS, ids=str)
def test_no_features_give_zero(variant: Variant) -> None:
    inputs = {
        name: np.full((1, 4, HEADS * WIDTH), -200.0, np.float32)
        for name in ("query", "key", "value")
    } | {"lengths": np.array([4])}
    for eps in EPS:
        for kernel in (False, True):
            assert not run(variant, inputs, eps, kernel=kernel).any()
