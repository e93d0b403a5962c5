from collections.abc import Callable

import numpy as np
import pytest

from .cases import Case, by_hand, error, make_inputs, variant_of
from .portable import every_form

FULL, CAUSAL = variant_of("AftFull", gate="none"), variant_of("CausalAftFull", gate="none")


@every_form
def test_bias_rows_are_queries(run: Callable) -> None:
    """The columns of the bias are keys."""
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
def test_zero_bias_gives_aft_simple(run: Callable) -> None:
    for prefix in ("", "Causal"):
        inputs = make_inputs(FULL.operator, Case("no bias", 40, (40, 25)))
        inputs["position_bias"][:] = 0
        simple = {n: x for n, x in inputs.items() if n != "position_bias"}
        expected = run(variant_of(f"{prefix}AftSimple"), simple)
        assert error(run(variant_of(f"{prefix}AftFull"), inputs), expected, inputs) < 1e-6


@every_form
def test_shorter_documents_use_top_left_bias(run: Callable) -> None:
    inputs = make_inputs(FULL.operator, Case("corner", 33, (33, 20), spare=31))
    cut = inputs | {"position_bias": inputs["position_bias"][:33, :33].copy()}
    inputs["position_bias"][33:] = 100
    inputs["position_bias"][:, 33:] = 100
    for variant in (FULL, CAUSAL):
        assert error(run(variant, inputs), run(variant, cut), inputs) < 1e-6


@every_form
def test_constant_on_bias_row_cancels(run: Callable) -> None:
    inputs = make_inputs(FULL.operator, Case("row", 33, (33, 20), spare=0))
    shifts = np.linspace(-20, 20, 33, dtype=np.float32)[:, None]
    moved = inputs | {"position_bias": inputs["position_bias"] + shifts}
    for variant in (FULL, CAUSAL):
        assert error(run(variant, moved), run(variant, inputs), inputs) < 1e-5


@every_form
def test_separate_maxima_do_not_underflow(run: Callable) -> None:
    """The largest key and the largest bias are in different places."""
    inputs = by_hand(
        (3,),
        query=[0, 0, 0],
        key=[100, 0, -100],
        value=[1, 2, 6],
        position_bias=[[-100, 0, 100]] * 3,
    )
    assert run(FULL, inputs)[0, :, 0] == pytest.approx([3, 3, 3], rel=1e-5)
    assert run(CAUSAL, inputs)[0, :, 0] == pytest.approx([1, 1.5, 3], rel=1e-5)
