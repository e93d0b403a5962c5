"""RecurrentLinearAttention and CausalDepthwiseConv in ONNX Runtime, against closed formulas."""

import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from oracles.recurrent import causal_depthwise_conv, recurrent_linear_attention
from recurrent_graphs import RULES, has_beta, has_decay

from .runner import session_of

Arrays = dict[str, np.ndarray]
INPUTS = {
    "RecurrentLinearAttention": (
        "query", "key", "value", "past_state", "decay", "beta", "lengths",
    ),
    "CausalDepthwiseConv": ("input", "weight", "bias", "past_state", "lengths"),
}  # fmt: skip
BATCH, TOKENS, QUERY_HEADS, HEADS, KEY, VALUE = 3, 37, 4, 2, 5, 18
ATTRIBUTES = {
    "update_rule": "gated_delta",
    "direction": "forward",
    "normalizer": "none",
    "decay_granularity": "head",
    "q_num_heads": QUERY_HEADS,
    "kv_num_heads": HEADS,
    "scale": 0.0,
    "eps": 1e-6,
}
BOUND = {"float32": 1e-5, "float16": 2e-3}


def session(
    op: str,
    inputs: Arrays,
    outputs: tuple[str, ...] = ("output", "present_state"),
    constants: tuple[str, ...] = (),
    **attributes: Any,
) -> onnxruntime.InferenceSession:
    """Return a session over one node; inputs without an array and outputs "" are absent."""
    element = helper.np_dtype_to_tensor_dtype(next(iter(inputs.values())).dtype)
    node = helper.make_node(
        op,
        [name if name in inputs else "" for name in INPUTS[op]],
        list(outputs),
        domain="ai.aftexport",
        **attributes,
    )
    given = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "lengths" else element, [None] * array.ndim
        )
        for name, array in inputs.items()
        if name not in constants
    ]
    stored = [numpy_helper.from_array(inputs[name], name) for name in constants]
    results = [helper.make_tensor_value_info(name, element, None) for name in outputs if name]
    graph = helper.make_graph([node], "one_op", given, results, stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.aftexport", 1)]
    return session_of(helper.make_model(graph, opset_imports=opsets, ir_version=9))


def run(op: str, inputs: Arrays, **attributes: Any) -> list[np.ndarray]:
    return session(op, inputs, **attributes).run(None, inputs)


def draw(attributes: dict[str, Any], *, past: bool = False, dtype: str = "float32") -> Arrays:
    """Draw the inputs of a recurrence; one document is whole, one short and one empty."""
    rng = np.random.default_rng(7)
    rule, summed = attributes["update_rule"], attributes["normalizer"] == "sum"
    features = rng.uniform(
        0.0 if summed else -0.5, 0.5, (BATCH, TOKENS, (QUERY_HEADS + HEADS) * KEY)
    )
    inputs = dict(
        zip(("query", "key"), np.split(features, [QUERY_HEADS * KEY], axis=2), strict=True)
    )
    inputs["value"] = rng.standard_normal((BATCH, TOKENS, HEADS * VALUE))
    if past:
        ways = 2 if attributes["direction"] == "bidirectional" else 1
        inputs["past_state"] = rng.uniform(0, 1, (BATCH, ways * HEADS, KEY, VALUE + summed))
    if has_decay(rule):
        width = HEADS * (KEY if attributes["decay_granularity"] == "channel" else 1)
        inputs["decay"] = -rng.exponential(0.2, (BATCH, TOKENS, width))
        inputs["decay"][:, ::7] = -80.0
    if has_beta(rule):
        inputs["beta"] = rng.uniform(0, 1, (BATCH, TOKENS, HEADS))
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    return inputs | {"lengths": np.array([TOKENS, 18, 0])}


def draw_convolution(dtype: str = "float32") -> Arrays:
    """Draw the inputs of a convolution; one document is whole, one short and one empty."""
    rng = np.random.default_rng(3)
    inputs = {
        "input": rng.standard_normal((3, 21, 19)),
        "weight": rng.standard_normal((19, 4)),
        "bias": rng.standard_normal(19),
        "past_state": rng.standard_normal((3, 3, 19)),
    }
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    return inputs | {"lengths": np.array([21, 2, 0])}


def spoil_padding(inputs: Arrays, *names: str) -> None:
    """Set the rows of padding to NaN."""
    for name in names:
        for document, length in zip(inputs[name], inputs["lengths"], strict=True):
            document[length:] = np.nan


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("rule", "form"),
    [
        *((rule, {}) for rule in RULES),
        ("gated", {"decay_granularity": "channel"}),
        ("gated_delta", {"decay_granularity": "channel"}),
        ("linear", {"normalizer": "sum"}),
        ("gated", {"normalizer": "sum"}),
    ],
)
def test_recurrence_equals_formula(
    rule: str, form: dict[str, str], direction: str, past: bool, dtype: str
) -> None:
    attributes = ATTRIBUTES | form | {"update_rule": rule, "direction": direction}
    inputs = draw(attributes, past=past, dtype=dtype)
    expected = recurrent_linear_attention(inputs, **attributes)
    spoil_padding(inputs, *(name for name in inputs if name not in ("past_state", "lengths")))
    for actual, exact in zip(
        run("RecurrentLinearAttention", inputs, **attributes), expected, strict=True
    ):
        assert actual.dtype == dtype
        assert error(actual, exact) < BOUND[dtype]


def test_decode_step_equals_next_token() -> None:
    inputs = draw(ATTRIBUTES)
    inputs["lengths"][:] = TOKENS
    whole, last = run("RecurrentLinearAttention", inputs, **ATTRIBUTES)
    state = np.zeros_like(last)
    for t in range(TOKENS):
        step = {name: array[:, t : t + 1] for name, array in inputs.items() if name != "lengths"}
        step |= {"past_state": state, "lengths": np.ones(BATCH, np.int64)}
        if t == 0:
            decoder = session("RecurrentLinearAttention", step, **ATTRIBUTES)
        row, state = decoder.run(None, step)
        np.testing.assert_allclose(row[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", [("output",), ("output", "")])
@pytest.mark.parametrize("op", INPUTS)
def test_state_output_may_be_absent(op: str, outputs: tuple[str, ...]) -> None:
    recurs = op == "RecurrentLinearAttention"
    inputs = draw(ATTRIBUTES) if recurs else draw_convolution()
    attributes = ATTRIBUTES if recurs else {"activation": "silu"}
    (alone,) = session(op, inputs, outputs, **attributes).run(None, inputs)
    np.testing.assert_array_equal(alone, run(op, inputs, **attributes)[0])


def test_no_tokens_take_no_memory() -> None:
    """Without tokens and states no tensor bounds the widths."""
    inputs = {name: np.zeros((1, 0, 2**40), np.float32) for name in ("query", "key", "value")}
    inputs["lengths"] = np.zeros(1, np.int64)
    attributes = {"update_rule": "linear", "q_num_heads": 1, "kv_num_heads": 1}
    one = session("RecurrentLinearAttention", inputs, ("output",), **attributes)
    assert one.run(None, inputs)[0].shape == (1, 0, 2**40)


def test_no_tokens_keep_the_state() -> None:
    past = draw(ATTRIBUTES, past=True)
    inputs = {name: array[:, :0] for name, array in past.items() if array.ndim == 3}
    inputs |= {"past_state": past["past_state"], "lengths": np.zeros(BATCH, np.int64)}
    inputs = {name: inputs[name] for name in INPUTS["RecurrentLinearAttention"]}
    output, state = run("RecurrentLinearAttention", inputs, **ATTRIBUTES)
    assert output.shape == (BATCH, 0, QUERY_HEADS * VALUE)
    np.testing.assert_array_equal(state, past["past_state"])


def test_beta_may_be_shared_by_heads() -> None:
    inputs = draw(ATTRIBUTES)
    inputs["beta"] = inputs["beta"][:, :, :1]
    shared = run("RecurrentLinearAttention", inputs, **ATTRIBUTES)
    inputs["beta"] = np.repeat(inputs["beta"], HEADS, axis=2)
    for one, other in zip(
        shared, run("RecurrentLinearAttention", inputs, **ATTRIBUTES), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("absent", [(), ("bias",), ("past_state",), ("bias", "past_state")])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_convolution_equals_formula(activation: str, absent: tuple[str, ...], dtype: str) -> None:
    drawn = draw_convolution(dtype)
    inputs = {name: array for name, array in drawn.items() if name not in absent}
    expected = causal_depthwise_conv(inputs, activation=activation)
    spoil_padding(inputs, "input")
    for actual, exact in zip(
        run("CausalDepthwiseConv", inputs, activation=activation), expected, strict=True
    ):
        assert error(actual, exact) < BOUND[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_constant_weight_gives_same_convolution(dtype: str) -> None:
    inputs = draw_convolution(dtype)
    expected = run("CausalDepthwiseConv", inputs, activation="silu")
    fed = {name: array for name, array in inputs.items() if name != "weight"}
    constant = session("CausalDepthwiseConv", inputs, constants=("weight",), activation="silu")
    for actual, exact in zip(constant.run(None, fed), expected, strict=True):
        np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize("constants", [(), ("weight",)])
def test_weight_of_other_width_is_refused(constants: tuple[str, ...]) -> None:
    inputs = draw_convolution() | {"weight": np.zeros((18, 4), np.float32)}
    fed = {name: array for name, array in inputs.items() if name not in constants}
    node = session("CausalDepthwiseConv", inputs, constants=constants)
    with pytest.raises((Fail, InvalidArgument, RuntimeException), match=r"expected \[19, taps\]"):
        node.run(None, fed)


@pytest.mark.parametrize(
    ("changes", "attributes", "expected"),
    [
        ({"decay": None}, {}, "decay is absent, expected one for the gated rules"),
        ({}, {"update_rule": "delta"}, "decay is given, expected none for the rules linear and"),
        ({"beta": None}, {}, "beta is absent, expected one for the delta rules"),
        ({}, {"update_rule": "lru"}, 'is "lru", expected linear, gated, delta or gated_delta'),
        ({}, {"q_num_heads": 3}, "q_num_heads is 3, expected a multiple of kv_num_heads 2"),
        ({}, {"kv_num_heads": 0}, "kv_num_heads is 0, expected at least 1"),
        ({}, {"normalizer": "sum"}, 'normalizer is "sum", expected none for the delta rules'),
        (
            {"decay": None, "beta": None},
            {"update_rule": "linear", "normalizer": "sum", "eps": math.inf},
            "eps is inf, expected a finite number of at least 0",
        ),
        ({"key": (BATCH, TOKENS, 9)}, {}, r"key has shape \[3, 37, 9\], expected \[3, 37, 10\]"),
        ({"query": (BATCH, TOKENS, 21)}, {}, "not divisible by q_num_heads 4"),
        ({"past_state": (BATCH, 1, 5, 18)}, {}, r"expected \[3, 2, 5, 18\]"),
        ({"decay": (BATCH, TOKENS, 3)}, {}, r"decay has shape \[3, 37, 3\], expected \[3, 37, 2\]"),
        ({"beta": (BATCH, TOKENS, 4)}, {}, r"beta has shape \[3, 37, 4\], expected \[3, 37, 2\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(
    changes: dict[str, tuple[int, ...] | None], attributes: dict[str, Any], expected: str
) -> None:
    inputs = draw(ATTRIBUTES)
    for name, shape in changes.items():
        if shape is None:
            del inputs[name]
        else:
            inputs[name] = np.zeros(shape, np.float32)
    with pytest.raises((Fail, InvalidArgument, RuntimeException), match=expected):
        run("RecurrentLinearAttention", inputs, **ATTRIBUTES | attributes)
