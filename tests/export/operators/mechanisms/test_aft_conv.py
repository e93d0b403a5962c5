from collections.abc import Callable

import numpy as np
import pytest

from .cases import Case, by_hand, error, make_inputs, variant_of
from .portable import every_form

CONV, CAUSAL = variant_of("AftConv", gate="none"), variant_of("CausalAftConv", gate="none")


def impulse(taps: list[float]) -> dict[str, np.ndarray]:
    return by_hand((4,), query=[0] * 4, key=[0] * 4, value=[1, 10, 100, 1000], filter=[taps])


@every_form
def test_odd_filter_is_centered_and_unflipped(run: Callable) -> None:
    inputs = impulse(np.log([2, 3, 4]).tolist())
    assert run(CONV, inputs, 1)[0, :, 0] == pytest.approx(
        [
            (3 * 1 + 4 * 10 + 100 + 1000) / 9,
            (2 * 1 + 3 * 10 + 4 * 100 + 1000) / 10,
            (1 + 2 * 10 + 3 * 100 + 4 * 1000) / 10,
            (1 + 10 + 2 * 100 + 3 * 1000) / 7,
        ]
    )


@every_form
def test_even_filter_reaches_further_right(run: Callable) -> None:
    inputs = impulse(np.log([2, 3]).tolist())
    assert run(CONV, inputs, 1)[0, :2, 0] == pytest.approx(
        [(2 * 1 + 3 * 10 + 100 + 1000) / 7, (1 + 2 * 10 + 3 * 100 + 1000) / 7]
    )


@every_form
def test_last_causal_tap_is_own_token(run: Callable) -> None:
    inputs = impulse(np.log([2, 3]).tolist())
    assert run(CAUSAL, inputs, 1)[0, :, 0] == pytest.approx(
        [1, (2 * 1 + 3 * 10) / 5, (1 + 2 * 10 + 3 * 100) / 6, (11 + 2 * 100 + 3 * 1000) / 7]
    )


@every_form
def test_zero_filter_gives_aft_simple(run: Callable) -> None:
    """It has one key for each head."""
    for prefix in ("", "Causal"):
        variant = variant_of(f"{prefix}AftConv")
        inputs = make_inputs(variant.operator, Case("no filter", 40, (40, 25)))
        inputs["filter"][:] = 0
        simple = {n: x for n, x in inputs.items() if n != "filter"}
        simple["key"] = np.repeat(inputs["key"], 4, axis=2)
        expected = run(variant_of(f"{prefix}AftSimple"), simple)
        assert error(run(variant, inputs), expected, inputs) < 1e-5


@every_form
def test_head_equals_relative_aft_local(run: Callable) -> None:
    """Each head is AFT-local with a relative bias."""
    for prefix, window in (("", 3), ("Causal", 5)):
        variant = variant_of(f"{prefix}AftConv")
        inputs = make_inputs(variant.operator, Case("heads", 40, (40, 25), window=5))
        result = run(variant, inputs)
        for head in range(2):
            own = slice(4 * head, 4 * head + 4)
            local = {n: inputs[n][..., own].copy() for n in ("query", "value")}
            local["key"] = np.repeat(inputs["key"][..., head : head + 1], 4, axis=2)
            local["band"] = inputs["filter"][head : head + 1].copy()
            assert local["band"].shape[1] == (window if prefix else 2 * window - 1)
            local["lengths"] = inputs["lengths"]
            ordered = {n: local[n] for n in variant_of(f"{prefix}AftLocal").operator.inputs}
            expected = run(variant_of(f"{prefix}AftLocal"), ordered)
            assert error(result[..., own], expected, ordered) < 1e-5
