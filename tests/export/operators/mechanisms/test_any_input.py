"""The portable body and the torch op on any input: near the definition, or at least finite.

Padding and later tokens change no row, and NaN is not hidden.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import fewer

from .cases import (
    BOUND,
    CAUSAL,
    ONE_GATE,
    VARIANTS,
    Case,
    Inputs,
    Variant,
    error,
    make_inputs,
    run_portable,
    run_reference,
    run_torch,
    with_tokens,
)

_HARD = [-1000.0, -100.0, -1.0, 0.0, 1.0, 88.0, 100.0, 1000.0]


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Draw cases of up to 70 tokens: any lengths, heads, windows and ranges."""
    tokens = draw(st.integers(1, 70))
    heads = draw(st.integers(1, 4))
    return Case(
        f"drawn {draw(st.integers(0, 999))}",
        tokens,
        tuple(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=4))),
        channels=heads * draw(st.integers(1, 4)),
        heads=heads,
        window=draw(st.integers(1, 40)),
        spare=draw(st.integers(0, 9)),
        relative=draw(st.booleans()),
        spread=draw(st.sampled_from([0.01, 1.0, 10.0, 100.0])),
        arrangement=draw(
            st.sampled_from(["random", "dominating key", "opposed", "late large key"])
        ),
    )


@st.composite
def hard_inputs(draw: st.DrawFn, variant: Variant) -> Inputs:
    """Draw inputs of two channels and two heads; every number is one of a few extremes."""
    tokens = draw(st.integers(1, 5))
    lengths = (tokens, draw(st.integers(0, tokens)))
    inputs = make_inputs(variant.operator, Case("hard", tokens, lengths, channels=2, window=3))
    for name in variant.operator.required_inputs[:-1]:
        size = inputs[name].size
        values = draw(st.lists(st.sampled_from(_HARD), min_size=size, max_size=size))
        inputs[name] = np.array(values, dtype=np.float32).reshape(inputs[name].shape)
    return inputs


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


@both_forms
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_padding_content_spares_valid_rows(
    run: Callable[..., np.ndarray], variant: Variant
) -> None:
    inputs = make_inputs(variant.operator, Case("padded", 66, (66, 40, 1)))
    changed = {n: x.copy() for n, x in inputs.items()}
    for document, length in enumerate(inputs["lengths"]):
        for name in ("query", "key", "value"):
            changed[name][document, length:] = 90 + changed[name][document, length:]
    assert error(run(variant, changed), run(variant, inputs), inputs) < 1e-6


@pytest.mark.parametrize("cut", [1, 31, 64, 69])
@both_forms
@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_later_tokens_spare_earlier_rows(
    run: Callable[..., np.ndarray], variant: Variant, cut: int
) -> None:
    inputs = make_inputs(variant.operator, Case("prefix", 70, (70, 70)))
    prefix = with_tokens(inputs, slice(0, cut))
    expected = run(variant, prefix | {"lengths": np.array([cut, cut])})
    changed = {n: x.copy() for n, x in inputs.items()}
    for name in ("query", "key", "value"):
        changed[name][:, cut:] *= 50
    for later in (inputs, changed):
        assert error(run(variant, later)[:, :cut], expected, prefix) < 1e-5


@pytest.mark.parametrize("name", ["query", "key", "value"])
@both_forms
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_nan_propagates_to_output(
    run: Callable[..., np.ndarray], variant: Variant, name: str
) -> None:
    inputs = make_inputs(variant.operator, Case("not a number", 40, (33, 40)))
    inputs[name][0, 20, 0] = np.nan
    result = run(variant, inputs)
    assert np.isnan(result[0, 20, 0])
    assert np.isfinite(result[1]).all()
