from collections.abc import Callable

import numpy as np
import pytest

from .cases import Case, by_hand, error, make_inputs, variant_of
from .portable import every_form

FULL, CAUSAL = variant_of("AftFull", gate="none"), variant_of("CausalAftFull", gate="none")


@every_form
def test_rows_of_the_bias_are_queries_and_columns_are_keys(run: Callable) -> None:
    log = np.log
    inputs = by_hand(
        (2,),
        query=[0, 0],
        key=[0, log(3)],
        value=[1, 10],
        position_bias=[[0, log(2)], [log(5), 0]],
    )
    assert run(FULL, inputs)[0, :, 0] == pytest.approx([(1 + 6 * 10) / 7, (5 + 3 * 10) / 8])
    assert run(CAUSAL, inputs)[0, :, 0] == pytest.approx([1, (5 + 3 * 10) / 8])


@every_form
def test_a_bias_of_zeros_leaves_aft_simple(run: Callable) -> None:
    for prefix in ("", "Causal"):
        inputs = make_inputs(FULL.operator, Case("no bias", 40, (40, 25)))
        inputs["position_bias"][:] = 0
        simple = {n: x for n, x in inputs.items() if n != "position_bias"}
        expected = run(variant_of(f"{prefix}AftSimple"), simple)
        assert error(run(variant_of(f"{prefix}AftFull"), inputs), expected, inputs) < 1e-6


@every_form
def test_shorter_documents_use_the_top_left_corner_of_the_bias(run: Callable) -> None:
    inputs = make_inputs(FULL.operator, Case("corner", 33, (33, 20), spare=31))
    cut = inputs | {"position_bias": inputs["position_bias"][:33, :33].copy()}
    inputs["position_bias"][33:] = 100
    inputs["position_bias"][:, 33:] = 100
    for variant in (FULL, CAUSAL):
        assert error(run(variant, inputs), run(variant, cut), inputs) < 1e-6


@every_form
def test_a_constant_added_to_a_row_of_the_bias_cancels(run: Callable) -> None:
    inputs = make_inputs(FULL.operator, Case("row", 33, (33, 20), spare=0))
    shifts = np.linspace(-20, 20, 33, dtype=np.float32)[:, None]
    moved = inputs | {"position_bias": inputs["position_bias"] + shifts}
    for variant in (FULL, CAUSAL):
        assert error(run(variant, moved), run(variant, inputs), inputs) < 1e-5


@every_form
def test_maxima_of_keys_and_biases_in_different_places_do_not_underflow(run: Callable) -> None:
    inputs = by_hand(
        (3,),
        query=[0, 0, 0],
        key=[100, 0, -100],
        value=[1, 2, 6],
        position_bias=[[-100, 0, 100]] * 3,
    )
    assert run(FULL, inputs)[0, :, 0] == pytest.approx([3, 3, 3], rel=1e-5)
    assert run(CAUSAL, inputs)[0, :, 0] == pytest.approx([1, 1.5, 3], rel=1e-5)
