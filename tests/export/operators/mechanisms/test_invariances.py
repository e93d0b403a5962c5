"""Change of the inputs that must not change the result of the torch op or the portable body."""

from collections.abc import Callable

import numpy as np
import pytest

from .cases import (
    BOUND,
    CAUSAL,
    ONE_GATE,
    Case,
    Inputs,
    Variant,
    error,
    make_inputs,
    run_torch,
    with_tokens,
)
from .portable import run_portable

Run = Callable[[Variant, Inputs], np.ndarray]

pytestmark = pytest.mark.parametrize("run", [run_torch, run_portable])


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_padding_content_spares_valid_rows(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("padded", 66, (66, 40, 1)))
    changed = {n: x.copy() for n, x in inputs.items()}
    for document, length in enumerate(inputs["lengths"]):
        for name in ("query", "key", "value"):
            changed[name][document, length:] = 90 + changed[name][document, length:]
    assert error(run(variant, changed), run(variant, inputs), inputs) < 1e-6


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_padded_document_equals_document_alone(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("alone", 66, (66, 40, 1)))
    together = run(variant, inputs)
    for document, length in enumerate(inputs["lengths"]):
        alone = with_tokens(inputs, slice(0, length))
        alone = {n: x[document : document + 1] if x.ndim in (1, 3) else x for n, x in alone.items()}
        expected = together[document : document + 1, :length]
        assert error(run(variant, alone), expected, alone) < 1e-6


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_documents_of_batch_do_not_mix(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("batch", 40, (40, 25, 40, 3)))
    order = np.array([2, 0, 3, 1])
    moved = {n: x[order] if x.ndim in (1, 3) else x for n, x in inputs.items()}
    assert error(run(variant, moved), run(variant, inputs)[order], moved) < 1e-6


@pytest.mark.parametrize("cut", [1, 31, 64, 69])
@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_later_tokens_spare_earlier_rows(run: Run, variant: Variant, cut: int) -> None:
    inputs = make_inputs(variant.operator, Case("prefix", 70, (70, 70)))
    prefix = with_tokens(inputs, slice(0, cut))
    expected = run(variant, prefix | {"lengths": np.array([cut, cut])})
    changed = {n: x.copy() for n, x in inputs.items()}
    for name in ("query", "key", "value"):
        changed[name][:, cut:] *= 50
    for later in (inputs, changed):
        assert error(run(variant, later)[:, :cut], expected, prefix) < 1e-5


@pytest.mark.parametrize("variant", CAUSAL, ids=str)
def test_late_large_key_spares_earlier_rows(run: Run, variant: Variant) -> None:
    calm = make_inputs(variant.operator, Case("calm", 40, (40, 40)))
    loud = {n: x.copy() for n, x in calm.items()}
    loud["key"][:, 30:] = 120
    before = slice(0, 30)
    expected = run(variant, calm)[:, before]
    assert error(run(variant, loud)[:, before], expected, with_tokens(loud, before)) < 1e-5


@pytest.mark.parametrize("variant", [v for v in CAUSAL if "conv" not in str(v)], ids=str)
def test_first_causal_row_sees_own_token(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("first", 9, (9, 9)))
    first = with_tokens(inputs, slice(0, 1))
    alone = run(variant, first | {"lengths": np.array([1, 1])})
    assert error(run(variant, inputs)[:, :1], alone, first) < 1e-6


# Not Fastformer's: P of the earlier tokens is causal too.
@pytest.mark.parametrize("variant", [v for v in CAUSAL if v.operator.stem != "fastformer"], ids=str)
def test_last_causal_row_sees_every_token(run: Run, variant: Variant) -> None:
    twin = Variant(variant.op_type.removeprefix("Causal"), variant.settings)
    inputs = make_inputs(variant.operator, Case("last", 70, (70, 70), window=5))
    whole = dict(inputs)
    if variant.operator.stem == "aft_local":
        # The causal band holds the first s columns of the band of 2s-1.
        whole["band"] = np.pad(inputs["band"], ((0, 0), (0, 4)))
    if variant.operator.stem == "aft_conv":
        # "Same" padding of 2s-1 taps reaches as far back as s causal taps.
        whole["filter"] = np.pad(inputs["filter"], ((0, 0), (0, 4)))
    last = with_tokens(inputs, slice(69, 70))
    expected = run(twin, whole)[:, 69:]
    assert error(run(variant, inputs)[:, 69:], expected, last) < BOUND["float32"]


@pytest.mark.parametrize(
    "variant",
    [v for v in ONE_GATE if not v.causal and v.operator.stem not in ("aft_local", "aft_conv")],
    ids=str,
)
def test_permuting_the_tokens_permutes_the_rows(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("permuted", 33, (33, 33), spare=0))
    order = np.random.default_rng(0).permutation(33)
    moved = with_tokens(inputs, order)
    if "position_bias" in moved:
        moved["position_bias"] = inputs["position_bias"][order][:, order]
    assert error(run(variant, moved), run(variant, inputs)[:, order], moved) < 1e-5


@pytest.mark.parametrize(
    "variant", [v for v in ONE_GATE if v.operator.stem.startswith("aft_")], ids=str
)
def test_constant_on_every_key_cancels(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("shifted", 40, (40, 25)))
    inputs["key"] = np.round(inputs["key"] * 256) / 256
    shifted = inputs | {"key": inputs["key"] + np.float32(64)}
    assert error(run(variant, shifted), run(variant, inputs), inputs) < 1e-5


@pytest.mark.parametrize(
    "variant", [v for v in ONE_GATE if v.operator.stem != "fastformer"], ids=str
)
def test_result_is_linear_in_values(run: Run, variant: Variant) -> None:
    inputs = make_inputs(variant.operator, Case("linear", 40, (40, 25)))
    other = np.random.default_rng(0).normal(size=inputs["value"].shape).astype(np.float32)
    of_sum = run(variant, inputs | {"value": 2 * inputs["value"] - other})
    sum_of = 2 * run(variant, inputs) - run(variant, inputs | {"value": other})
    assert error(of_sum, sum_of, inputs) < 1e-5


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_nan_propagates_to_output(run: Run, variant: Variant, name: str) -> None:
    inputs = make_inputs(variant.operator, Case("not a number", 40, (33, 40)))
    inputs[name][0, 20, 0] = np.nan
    result = run(variant, inputs)
    assert np.isnan(result[0, 20, 0])
    assert np.isfinite(result[1]).all()
