"""Uncounted keys and rows without counted keys: every form gives the same numbers."""

from itertools import product

import numpy as np
import pytest
from oracles.mechanisms import MECHANISMS

from .cases import (
    ONE_GATE,
    Case,
    Inputs,
    Variant,
    as_tensors,
    make_inputs,
    named,
    run_kernel,
    run_portable,
    run_torch,
    with_tokens,
)

LOWEST = float(np.finfo(np.float32).min)
LOW = [-np.inf, -1e38, LOWEST, -np.inf, -3e38, -1e38]

CASE = Case("uncounted keys", 70, (70, 45, 0, 1))
SHORT = Case("uncounted keys of a short document", 9, (9, 4, 0), window=6)
SOFTMAX = [
    v
    for v in ONE_GATE
    if v.operator.stem.startswith("aft_") or dict(v.settings).get("normalization") == "softmax"
]
"""Every mechanism that takes the keys as logits."""

SCALING = [v for v in ONE_GATE if dict(v.settings).get("normalization") == "scaling"]
LINEAR = [v for v in ONE_GATE if v.operator.stem == "linear_attention"]


WITHOUT_WEIGHT = {
    "one key": np.s_[:, 2],
    "first keys": np.s_[:, :5],
    "one channel": np.s_[..., 0],
    "some channels of some keys": np.s_[0, 1::3, ::2],
    "all keys": np.s_[:],
    "one document": np.s_[0],
}
"""The keys that become -inf."""
SOME_CHANGES = ["one key", "first keys", "one channel", "all keys", "padded keys"]
CHANGES = [*WITHOUT_WEIGHT, "padded keys", "low keys beside others", "low keys", "lowest keys"]


def change(name: str, inputs: Inputs) -> None:
    """Change the keys in place."""
    key = inputs["key"]
    tokens = key.shape[1]
    if name == "padded keys":
        for document, length in enumerate(inputs["lengths"]):
            key[document, length:] = -np.inf
    elif name == "low keys beside others":
        key[:, 1:7] = np.array(LOW, np.float32)[: tokens - 1, None]
    elif name == "low keys":
        key[:] = np.resize(np.array(LOW, np.float32), tokens)[:, None]
    elif name == "lowest keys":
        key[:, ::2] = LOWEST
        key[:, 1::2] = -np.inf
    else:
        key[WITHOUT_WEIGHT[name]] = -np.inf


def definition(variant: Variant, inputs: Inputs) -> np.ndarray:
    """Compute the formula in float64."""
    attributes = variant.attributes(2)
    return MECHANISMS[variant.operator.stem](inputs, causal=variant.causal, **attributes)


def check(variant: Variant, inputs: Inputs) -> None:
    """Check that every form gives the formula's numbers."""
    expected = definition(variant, inputs)
    assert np.isfinite(expected).all()
    tolerance = 2e-3 if inputs["query"].dtype == np.float16 else 3e-5
    for run in (run_kernel, run_torch, run_portable):
        output = run(variant, inputs)
        for document, length in enumerate(inputs["lengths"]):
            rows = slice(0, int(length) or None)  # of an empty document every row is 0
            found, exact = output[document, rows], expected[document, rows]
            np.testing.assert_allclose(found, exact, tolerance, tolerance, err_msg=run.__name__)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("case", [CASE, SHORT], ids=str)
@pytest.mark.parametrize("variant", SOFTMAX, ids=str)
def test_keys_without_weight(variant: Variant, case: Case, name: str) -> None:
    inputs = make_inputs(variant.operator, case)
    change(name, inputs)
    check(variant, inputs)


@pytest.mark.parametrize("name", SOME_CHANGES[:-1])
@pytest.mark.parametrize("variant", SOFTMAX, ids=str)
def test_float16_keys_without_weight(variant: Variant, name: str) -> None:
    inputs = make_inputs(variant.operator, CASE, "float16")
    change(name, inputs)
    check(variant, inputs)


@pytest.mark.parametrize("name", SOME_CHANGES)
@pytest.mark.parametrize("variant", LINEAR, ids=str)
def test_features_of_minus_infinity(variant: Variant, name: str) -> None:
    inputs = make_inputs(variant.operator, CASE)
    change(name, inputs)
    check(variant, inputs)


@pytest.mark.parametrize("low", [-1e38, LOWEST])
@pytest.mark.parametrize("cut", [5, 66])
@pytest.mark.parametrize("variant", [v for v in SOFTMAX if v.causal], ids=str)
def test_causal_rows_of_low_keys(variant: Variant, cut: int, low: float) -> None:
    """The rows before the first ordinary key are as if it did not exist."""
    inputs = make_inputs(variant.operator, Case("low keys first", 70, (70, 70)))
    inputs["key"][:, :cut] = low
    few = with_tokens(inputs, slice(0, cut)) | {"lengths": np.array([cut, cut])}
    expected = definition(variant, few)
    for run in (run_kernel, run_torch, run_portable):
        np.testing.assert_allclose(run(variant, inputs)[:, :cut], expected, 3e-5, 3e-5)


@pytest.mark.parametrize("variant", LINEAR + SCALING, ids=str)
def test_padded_keys_of_minus_infinity(variant: Variant) -> None:
    inputs = make_inputs(variant.operator, CASE)
    change("padded keys", inputs)
    check(variant, inputs)


@pytest.mark.parametrize(**named(list(product(ONE_GATE, (CASE, SHORT)))))
def test_empty_document_is_zero(variant: Variant, case: Case) -> None:
    inputs = make_inputs(variant.operator, case)
    check(variant, inputs)
    empty = list(inputs["lengths"]).index(0)
    for run in (run_kernel, run_torch, run_portable):
        assert not run(variant, inputs)[empty].any(), run.__name__


@pytest.mark.parametrize("variant", SOFTMAX, ids=str)
def test_rows_without_keys_are_zero(variant: Variant) -> None:
    inputs = make_inputs(variant.operator, CASE)
    change("all keys", inputs)
    for run in (run_kernel, run_torch, run_portable):
        output = run(variant, inputs)
        for document, length in enumerate(inputs["lengths"]):
            assert not output[document, :length].any(), run.__name__


@pytest.mark.parametrize("low", [-1e38, -3e38])
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    "variant", [v for v in SOFTMAX if v.operator.stem in ("aft_local", "aft_conv")], ids=str
)
def test_keys_in_windows_of_low_biases(variant: Variant, short: bool, low: float) -> None:
    """A window over all keys drops out; else only the keys outside it count."""
    tokens, window = (6, 13) if short else (40, 4)
    inputs = make_inputs(variant.operator, Case("low window", tokens, (tokens,) * 2, window=window))
    bias = inputs["band" if "band" in inputs else "filter"]
    bias[:] = low
    check(variant, inputs)


@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("length", [70, 45])
@pytest.mark.parametrize("low", [-1e38, -3e38])
@pytest.mark.parametrize("arrangement", ["all", "seen", "columns", "rows"])
@pytest.mark.parametrize("variant", [v for v in SOFTMAX if "AftFull" in v.op_type], ids=str)
def test_keys_beside_low_biases_keep_digits(
    variant: Variant, arrangement: str, low: float, length: int, spread: float
) -> None:
    case = Case("low biases", 70, (length, length), spread=spread)
    inputs = make_inputs(variant.operator, case)
    bias = inputs["position_bias"]
    if arrangement == "all":
        bias[:] = low
    elif arrangement == "seen":  # the keys beyond have larger ones
        bias[:, :length] = low
    elif arrangement == "columns":
        bias[:, ::2] = low
    else:
        bias[::2] = low
    check(variant, inputs)


@pytest.mark.parametrize("name", SOME_CHANGES)
@pytest.mark.parametrize("variant", SOFTMAX, ids=str)
def test_gradients_are_numbers(variant: Variant, name: str) -> None:
    inputs = make_inputs(variant.operator, SHORT)
    change(name, inputs)
    *floats, lengths = as_tensors(inputs)
    leaves = [x.requires_grad_() for x in floats]
    variant.operator.torch_op(*leaves, lengths, *variant.attributes(2).values()).sum().backward()
    for tensor, leaf in zip(inputs, leaves, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all(), tensor
    key = leaves[1]
    assert key.grad is not None
    assert not key.grad[key == -np.inf].any()
