"""The causal depthwise convolution: definition, torch op and portable body."""

from itertools import product

import numpy as np
import pytest
import torch
from onnx_runtimes import RUNTIMES
from oracles.recurrent import causal_depthwise_conv

from aftexport.parity import TOLERANCES

from .recurrent_cases import (
    CONVOLUTION,
    Arrays,
    error,
    one_node,
    run_definition,
    run_torch,
    tensors_of,
    typed,
)

BOUNDS = {"float32": TOLERANCES["fp32"].bound, "float16": TOLERANCES["fp16"].bound}
FORMS = list(product(("none", "silu"), (False, True), (False, True)))
"""The activation, and the presence of bias and past state."""
SHAPES = [(1, 4), (6, 4), (6, 1), (3, 7), (40, 2)]
"""Tokens and taps."""
every_form = pytest.mark.parametrize(("activation", "has_bias", "has_past"), FORMS)


def draw(tokens: int, taps: int, has_bias: bool, has_past: bool) -> Arrays:
    """Draw three documents that float16 holds: a whole one, an empty one, and a part."""
    rng = np.random.default_rng(100 * tokens + taps)
    inputs = {"input": rng.normal(size=(3, tokens, 5)), "weight": rng.normal(size=(5, taps))}
    if has_bias:
        inputs["bias"] = rng.normal(size=5)
    if has_past:
        inputs["past_state"] = rng.normal(size=(3, taps - 1, 5))
    lengths = np.array([tokens + 2, 0, tokens // 2 + 1])
    return typed(inputs, "float16") | {"lengths": lengths}


@every_form
@pytest.mark.parametrize(("tokens", "taps"), SHAPES)
def test_forms_equal_formula(
    activation: str, has_bias: bool, has_past: bool, tokens: int, taps: int
) -> None:
    inputs = draw(tokens, taps, has_bias, has_past)
    expected = list(causal_depthwise_conv(inputs, activation=activation))
    attributes = {"activation": activation}
    assert error(run_definition(CONVOLUTION, inputs, attributes), expected) < 1e-12
    for dtype, bound in BOUNDS.items():
        assert error(run_torch(CONVOLUTION, typed(inputs, dtype), attributes), expected) < bound


@pytest.mark.table(keep=0.1)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("tokens", "taps"), SHAPES)
@every_form
def test_body_is_right_in_runtime(
    activation: str,
    has_bias: bool,
    has_past: bool,
    tokens: int,
    taps: int,
    runtime: str,
    dtype: str,
) -> None:
    inputs = typed(draw(tokens, taps, has_bias, has_past), dtype)
    attributes = {"activation": activation}
    results = RUNTIMES[runtime](one_node(CONVOLUTION, inputs, attributes).model())(inputs)
    expected = list(causal_depthwise_conv(inputs, activation=activation))
    assert error([results[n] for n in CONVOLUTION.outputs], expected) < BOUNDS[dtype]


def test_parts_of_document_equal_whole() -> None:
    inputs = typed(draw(40, 4, True, True), "float64")
    attributes = {"activation": "silu"}
    whole, last = run_definition(CONVOLUTION, inputs, attributes)
    rows, state = [], inputs["past_state"]
    for start, end in ((0, 1), (1, 3), (3, 21), (21, 40)):
        lengths = np.clip(inputs["lengths"], start, end) - start
        cut = {"input": inputs["input"][:, start:end], "past_state": state, "lengths": lengths}
        row, state = run_torch(CONVOLUTION, inputs | cut, attributes)
        rows.append(row)
    assert error([np.concatenate(rows, 1), state], [whole, last]) < 1e-12


def test_padding_is_not_read() -> None:
    inputs = typed(draw(6, 4, True, True), "float32")
    clean = run_torch(CONVOLUTION, inputs, {"activation": "silu"})
    inputs["input"][1] = inputs["input"][2, 4:] = np.nan
    output, state = run_torch(CONVOLUTION, inputs, {"activation": "silu"})
    np.testing.assert_array_equal(output, clean[0])
    np.testing.assert_array_equal(state, clean[1])
    assert not output[1].any()


@every_form
def test_gradients_equal_finite_differences(
    activation: str, has_bias: bool, has_past: bool
) -> None:
    tensors = tensors_of(CONVOLUTION, typed(draw(6, 3, has_bias, has_past), "float64"))
    names = [n for n, x in zip(CONVOLUTION.inputs, tensors, strict=True) if x is not None]

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = dict(zip(names, given, strict=True))
        return CONVOLUTION.torch_op(*map(by_name.get, CONVOLUTION.inputs), activation)

    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in tensors if x is not None]
    assert torch.autograd.gradcheck(run, leaves)
    torch.library.opcheck(
        CONVOLUTION.torch_op,
        (*tensors, activation),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input", (3, 6), r"input must be \[batch, tokens, channels\]"),
        ("weight", (4, 4), r"weight must be \[5, taps\]"),
        ("weight", (5, 0), r"weight must be \[5, taps\]"),
        ("bias", (4,), r"bias must be \[5\]"),
        ("past_state", (3, 4, 5), r"past_state must be \[3, 3, 5\]"),
    ],
)
def test_unfit_inputs_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    inputs = typed(draw(6, 4, True, True), "float32") | {name: np.zeros(shape, np.float32)}
    with pytest.raises(ValueError, match=f"CausalDepthwiseConv: {message}"):
        run_torch(CONVOLUTION, inputs, {"activation": "none"})
