"""Sums over many tokens of one sign stay exact: their rounding must not pile up."""

import os
from collections.abc import Callable

import numpy as np
import pytest

from .cases import ONE_GATE, Case, Inputs, Variant, make_inputs, run_torch
from .portable import run_portable

BOUND = 1e-4
MILLION, MANY = 1_048_576, 65_536
# A position bias for 16,384 tokens takes a gigabyte, and its exponentials ten: see `make test-all`.
FULL = 16_384 if "AFT_TEST_ALL" in os.environ else 8192
SHORT = 2048
HEADS = 2
LINEAR = [v for v in ONE_GATE if v.operator.stem != "aft_full"]
QUADRATIC = [v for v in ONE_GATE if v.operator.stem == "aft_full"]
both_forms = pytest.mark.parametrize("run", [run_portable, run_torch])


def tokens_like(variant: Variant, tokens: int, kind: str, scale: float = 1.0) -> Inputs:
    """Return a document whose sums over the tokens have terms of one sign.

    Kinds: ``equal``, one token repeated; ``near``, up to 1e-4 of noise; ``one-sided``, random.
    """
    case = Case("one token", 1, (1,), channels=2 * HEADS, window=3, relative=True, spare=0)
    inputs = make_inputs(variant.operator, case)
    random = np.random.default_rng(0)
    for name in ("query", "key", "value"):
        row = random.normal(size=(1, 1, inputs[name].shape[2])) * scale
        rows = np.repeat(row, tokens, axis=1)
        if kind == "near":
            rows *= 1 + 1e-4 * random.normal(size=rows.shape)
        elif kind == "one-sided":
            rows = np.abs(row) * random.uniform(size=rows.shape)
        inputs[name] = rows.astype(np.float32)
    if "position_bias" in inputs:
        inputs["position_bias"] = np.zeros((tokens, tokens), np.float32)
    return inputs | {"lengths": np.array([tokens])}


def exact(variant: Variant, inputs: Inputs) -> np.ndarray:
    wide = {n: x if n == "lengths" else x.astype(np.float64) for n, x in inputs.items()}
    return run_torch(variant, wide, HEADS)


def assert_near(result: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(result - expected).max() <= BOUND * np.abs(expected).max()


@pytest.mark.table(keep=0.5)
@both_forms
@pytest.mark.parametrize("variant", LINEAR, ids=str)
def test_a_million_equal_tokens(variant: Variant, run: Callable[..., np.ndarray]) -> None:
    """Each row beyond the first is that of a shorter document's end."""
    result = run(variant, tokens_like(variant, MILLION, "equal"), HEADS)
    expected = exact(variant, tokens_like(variant, SHORT, "equal"))
    assert_near(result[:, :SHORT], expected)
    assert_near(result[:, SHORT:], expected[:, -1:])


@pytest.mark.table(keep=0.25)
@both_forms
@pytest.mark.parametrize(
    ("kind", "scale"), [("equal", 0.3), ("equal", 5.0), ("near", 1.0), ("one-sided", 1.0)]
)
@pytest.mark.parametrize("variant", LINEAR, ids=str)
def test_many_tokens_of_one_sign(
    variant: Variant, kind: str, scale: float, run: Callable[..., np.ndarray]
) -> None:
    inputs = tokens_like(variant, MANY, kind, scale)
    assert_near(run(variant, inputs, HEADS), exact(variant, inputs))


@pytest.mark.table(keep=0.5)
@both_forms
@pytest.mark.parametrize("variant", QUADRATIC, ids=str)
def test_many_equal_tokens_of_aft_full(variant: Variant, run: Callable[..., np.ndarray]) -> None:
    result = run(variant, tokens_like(variant, FULL, "equal"), HEADS)
    expected = exact(variant, tokens_like(variant, 1, "equal"))
    assert_near(result, expected)


@pytest.mark.parametrize("variant", [v for v in LINEAR if v.causal], ids=str)
def test_large_key_after_many_equal_tokens(variant: Variant) -> None:
    """Sums that do not fit one scale are taken by another form of the body."""
    inputs = tokens_like(variant, MANY, "equal")
    inputs["key"][:, -1] += 120
    assert_near(run_portable(variant, inputs, HEADS)[:, :-1], exact(variant, inputs)[:, :-1])


@pytest.mark.table(keep=0.34)
@pytest.mark.parametrize("length", [1, 1000, 40_001])
@pytest.mark.parametrize("variant", LINEAR, ids=str)
def test_padding_of_long_batch_is_ignored(variant: Variant, length: int) -> None:
    """The blocks cut across the end of the document."""
    inputs = tokens_like(variant, MANY, "near")
    inputs["key"][:, length:] = 50.0
    inputs["value"][:, length:] = 1e6
    inputs["lengths"] = np.array([length])
    result = run_portable(variant, inputs, HEADS)
    assert np.isfinite(result).all()
    assert_near(result[:, :length], exact(variant, inputs)[:, :length])
