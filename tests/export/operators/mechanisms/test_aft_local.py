from collections.abc import Callable

import numpy as np
import pytest

from .cases import Case, by_hand, error, make_inputs, truth, variant_of
from .portable import every_form

LOCAL, CAUSAL = variant_of("AftLocal", gate="none"), variant_of("CausalAftLocal", gate="none")


@every_form
def test_band_column_is_relative_position(run: Callable) -> None:
    """Column j is the bias of key t + j - (s - 1)."""
    log = np.log
    inputs = by_hand(
        (3,),
        query=[0, 0, 0],
        key=[0, 0, 0],
        value=[1, 10, 100],
        band=[[9, log(2), log(3)], [log(4), log(5), log(6)], [log(7), log(8), 9]],
    )
    assert run(LOCAL, inputs)[0, :, 0] == pytest.approx(
        [(2 + 3 * 10 + 100) / 6, (4 + 5 * 10 + 6 * 100) / 15, (1 + 7 * 10 + 8 * 100) / 16]
    )
    inputs["band"] = inputs["band"][:, :2].copy()
    assert run(CAUSAL, inputs)[0, :, 0] == pytest.approx(
        [1, (4 + 5 * 10) / 9, (1 + 7 * 10 + 8 * 100) / 16]
    )


@every_form
def test_keys_outside_window_have_zero_bias(run: Callable) -> None:
    """Their weight is not zero: with its window held down, a row is the mean of the rest."""
    inputs = make_inputs(LOCAL.operator, Case("outside", 20, (20,), window=2))
    inputs["key"][:] = 0
    inputs["band"][:] = -100
    value = inputs["value"].astype(np.float64)
    result = run(LOCAL, inputs)
    assert result[0, 0] == pytest.approx(value[0, 2:].mean(0), abs=1e-5)
    expected = np.delete(value[0], [9, 10, 11], 0).mean(0)
    assert result[0, 10] == pytest.approx(expected, abs=1e-5)


@every_form
def test_zero_band_gives_aft_simple(run: Callable) -> None:
    for prefix in ("", "Causal"):
        variant = variant_of(f"{prefix}AftLocal")
        inputs = make_inputs(variant.operator, Case("no bias", 70, (70, 25)))
        inputs["band"][:] = 0
        simple = {n: x for n, x in inputs.items() if n != "band"}
        expected = run(variant_of(f"{prefix}AftSimple"), simple)
        assert error(run(variant, inputs), expected, inputs) < 1e-5


@every_form
@pytest.mark.parametrize("window", [1, 5, 40])
def test_layer_is_aft_full_with_band(run: Callable, window: int) -> None:
    for prefix in ("", "Causal"):
        variant = variant_of(f"{prefix}AftLocal")
        inputs = make_inputs(variant.operator, Case("banded", 36, (36, 25), window=window, spare=0))
        bias = np.zeros((36, 36), dtype=np.float32)
        for t in range(36):
            for j, value in enumerate(inputs["band"][t]):
                if 0 <= t + j - (window - 1) < 36:
                    bias[t, t + j - (window - 1)] = value
        full = {("position_bias" if n == "band" else n): x for n, x in inputs.items()}
        full["position_bias"] = bias
        expected = run(variant_of(f"{prefix}AftFull"), full)
        assert error(run(variant, inputs), expected, inputs) < 1e-5


@every_form
def test_one_band_row_serves_every_token(run: Callable) -> None:
    for variant in (LOCAL, CAUSAL):
        inputs = make_inputs(variant.operator, Case("relative", 70, (70, 25), relative=True))
        rows = inputs | {"band": np.repeat(inputs["band"], 75, axis=0)}
        assert error(run(variant, inputs), run(variant, rows), inputs) < 1e-6


@every_form
def test_dominating_key_with_negative_bias_survives(run: Callable) -> None:
    """(exp(w) - 1) over the window plus a sum over all keys is wrong by 4e-2 here."""
    case = Case("cancelling", 64, (64,), window=3)
    for variant in (LOCAL, CAUSAL):
        inputs = make_inputs(variant.operator, case)
        expected = truth(variant, case)
        assert error(run(variant, inputs), expected, inputs) < 1e-6
        inputs["key"][:, 30] = 16
        inputs["band"][:] = -30
        rest = inputs["value"].astype(np.float64)
        weight = np.exp(inputs["key"].astype(np.float64))
        in_window = range(28, 33) if variant is LOCAL else range(28, 31)
        ends = 64 if variant is LOCAL else 31
        weight[:, list(in_window)] *= np.exp(-30)
        mean = (weight * rest)[:, :ends].sum(1) / weight[:, :ends].sum(1)
        assert np.abs(run(variant, inputs)[:, 30] - mean).max() < 1e-5
