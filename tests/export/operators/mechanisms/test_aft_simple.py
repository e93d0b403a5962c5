from collections.abc import Callable

import numpy as np
import pytest

from .cases import Case, by_hand, error, make_inputs, variant_of
from .portable import every_form

SIMPLE = variant_of("AftSimple", gate="none")
CAUSAL = variant_of("CausalAftSimple", gate="none")


@every_form
def test_softmax_runs_over_tokens_per_channel(run: Callable) -> None:
    inputs = by_hand(
        (2,),
        query=[[[0, 0], [0, 0]]],
        key=[[[0, 0], [np.log(3), np.log(9)]]],
        value=[[[4, 10], [8, 20]]],
    )
    assert run(SIMPLE, inputs)[0, 1] == pytest.approx([7, 19])
    assert run(CAUSAL, inputs)[0] == pytest.approx(np.array([[4, 10], [7, 19]]))


@every_form
def test_equal_keys_give_mean_of_values(run: Callable) -> None:
    inputs = make_inputs(SIMPLE.operator, Case("equal", 30, (30, 7)))
    inputs["key"][:] = 5
    value = inputs["value"]
    assert run(SIMPLE, inputs)[1, 3] == pytest.approx(value[1, :7].mean(0), abs=1e-6)
    assert run(CAUSAL, inputs)[0, 11] == pytest.approx(value[0, :12].mean(0), abs=1e-6)


@every_form
def test_rows_without_gate_are_equal(
    run: Callable,
) -> None:
    """There is one row for each token."""
    inputs = make_inputs(SIMPLE.operator, Case("no gate", 30, (30, 7)))
    result = run(SIMPLE, inputs)
    assert result.shape == (2, 30, 8)
    assert np.abs(result - result[:, :1]).max() == 0


@every_form
@pytest.mark.parametrize(
    ("gate", "function"), [("sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("tanh", np.tanh)]
)
def test_query_gate_multiplies_mean(run: Callable, gate: str, function: Callable) -> None:
    inputs = make_inputs(SIMPLE.operator, Case("gates", 30, (30, 7)))
    for op_type in ("AftSimple", "CausalAftSimple"):
        mean = run(variant_of(op_type, gate="none"), inputs)
        result = run(variant_of(op_type, gate=gate), inputs)
        assert error(result, function(inputs["query"]) * mean, inputs) < 1e-6


@every_form
def test_late_large_key_spares_earlier_rows(run: Callable) -> None:
    inputs = by_hand((4,), query=[0] * 4, key=[0, 0, 0, 120], value=[3, 6, 9, -1])
    assert run(CAUSAL, inputs)[0, :, 0] == pytest.approx([3, 4.5, 6, -1], rel=1e-6)
