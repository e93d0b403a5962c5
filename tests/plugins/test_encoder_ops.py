"""The encoder's operators, as ONNX Runtime runs them, against their definitions in float64."""

import math
import platform
from typing import Any

import numpy as np
import pytest
from encoder_forms import FORMS, NORMED, PLAIN, Form
from oracles.mechanisms import layer_norm

from .encoder_runner import BOUND, HALF_BOUND, SEQUENCES, error, outputs
from .encoder_runner import run as run_operator

LINEAR, QUERY_KEY_VALUE, FEED_FORWARD, RESIDUAL = PLAIN

# batch, tokens, width, and the hidden or output width
SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 256, 1024),
    (2, 3, 13, 7),
    (1, 5, 16, 16),
    (3, 11, 17, 33),
    (1, 12, 31, 65),
    (2, 13, 48, 31),
    (1, 25, 129, 100),
    (1, 97, 256, 768),
    (2, 50, 64, 257),
    (1, 40, 515, 530),
    (1, 14, 1030, 1100),
    (1, 7, 2100, 40),
    (1, 301, 32, 128),
]


def random_inputs(
    tested: Form, batch: int, tokens: int, width: int, other: int, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    op, inputs = tested.op, {"x": normal(batch, tokens, width) + 0.5}
    if op != "LinearResidual":
        inputs |= {"norm_weight": 1 + 0.3 * normal(width), "norm_bias": 0.3 * normal(width)}
    if op == "LayerNormFeedForward":
        inputs |= {"weight_in": normal(width, other) / math.sqrt(width)}
        inputs |= {"weight_out": normal(other, width) / math.sqrt(other)}
        inputs |= {"weight_up": normal(width, other) / math.sqrt(width)}
        inputs |= {"bias_in": 0.5 * normal(other), "bias_out": 0.5 * normal(width)}
        inputs |= {"bias_up": 0.5 * normal(other)}
    elif op == "LayerNormQueryKeyValue":
        for name, columns in query_key_value(width, other).items():
            inputs[f"{name}_weight"] = normal(width, columns) / math.sqrt(width)
            inputs[f"{name}_bias"] = 0.5 * normal(columns)
    else:
        inputs |= {"weight": normal(width, other) / math.sqrt(width), "bias": 0.5 * normal(other)}
    if op == "LinearResidual":
        inputs |= {"residual": normal(batch, tokens, other)}
    return {name: x for name, x in inputs.items() if name not in tested.absent}


def query_key_value(width: int, other: int) -> dict[str, int]:
    """Return the widths of the outputs, by default all different."""
    return {"query": other, "key": 1 + other // 9, "value": width}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def definition(tested: Form, inputs: dict[str, np.ndarray], epsilon: float = 1e-5) -> np.ndarray:
    i = {name: x.astype(np.float64) for name, x in inputs.items()}
    normed = i["x"]
    if "norm_weight" in i and tested.attributes.get("norm") == "rms":
        mean_square = (normed**2).mean(axis=-1, keepdims=True)
        normed = normed / np.sqrt(mean_square + epsilon) * i["norm_weight"] + i.get("norm_bias", 0)
    elif "norm_weight" in i:
        normed = layer_norm(normed, i["norm_weight"], i.get("norm_bias", 0), epsilon)
    if tested.op == "LayerNormQueryKeyValue":
        parts = ("query", "key", "value")
        return np.concatenate(
            [normed @ i[f"{p}_weight"] + i.get(f"{p}_bias", 0) for p in parts], axis=-1
        )
    if tested.op != "LayerNormFeedForward":
        return i.get("residual", 0) + normed @ i["weight"] + i.get("bias", 0)
    activation = ACTIVATIONS[tested.attributes.get("activation", "gelu")]
    hidden = activation(normed @ i["weight_in"] + i.get("bias_in", 0))
    if "weight_up" in i:
        hidden = hidden * (normed @ i["weight_up"] + i.get("bias_up", 0))
    return i["x"] + hidden @ i["weight_out"] + i.get("bias_out", 0)


def run(tested: Form, inputs: dict[str, np.ndarray], **options: Any) -> np.ndarray:
    return run_operator(tested.op, inputs, **tested.attributes, **options)


def error_of(tested: Form, inputs: dict[str, np.ndarray], **options: Any) -> float:
    return error(run(tested, inputs, **options), definition(tested, inputs))


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_operator_equals_definition(tested: Form, shape: tuple[int, ...], precision: str) -> None:
    inputs = random_inputs(tested, *shape)
    assert error_of(tested, inputs, precision=precision) <= BOUND[precision]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_query_key_value_equal_separate_layers(
    shape: tuple[int, ...], precision: str, dtype: type[np.floating]
) -> None:
    inputs = random_inputs(QUERY_KEY_VALUE, *shape)
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    norm = {name: inputs[name] for name in ("x", "norm_weight", "norm_bias")}
    results = outputs("LayerNormQueryKeyValue", inputs, precision=precision)
    for name, result in zip(("query", "key", "value"), results, strict=True):
        alone = norm | {"weight": inputs[f"{name}_weight"], "bias": inputs[f"{name}_bias"]}
        np.testing.assert_array_equal(result, run(LINEAR, alone, precision=precision))


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_float16_tensors_match_definition(
    tested: Form, shape: tuple[int, ...], constant: bool
) -> None:
    inputs = {name: x.astype(np.float16) for name, x in random_inputs(tested, *shape).items()}
    actual = run(tested, inputs, constant=constant)
    assert actual.dtype == np.float16
    assert error(actual, definition(tested, inputs)) <= HALF_BOUND


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("width", [13, 64, 300])
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_nan_inputs_propagate_to_output(tested: Form, width: int, precision: str) -> None:
    inputs = random_inputs(tested, 2, 19, width, 72)
    clean = run(tested, inputs, precision=precision)
    inputs["x"][1, 7, width // 2] = np.nan
    result = run(tested, inputs, precision=precision)
    assert np.isnan(result[1, 7]).all()
    result[1, 7] = clean[1, 7]
    np.testing.assert_array_equal(result, clean)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_nan_parameters_propagate_to_output(
    tested: Form, precision: str, dtype: type[np.floating]
) -> None:
    clean = {name: x.astype(dtype) for name, x in random_inputs(tested, 2, 19, 64, 72).items()}
    for name in clean.keys() - SEQUENCES:
        damaged = clean[name].copy()
        damaged.flat[5] = np.nan
        results = outputs(
            tested.op, clean | {name: damaged}, precision=precision, **tested.attributes
        )
        assert any(np.isnan(result).any() for result in results), name


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_non_constant_weights_give_same_result(tested: Form, precision: str) -> None:
    inputs = random_inputs(tested, 2, 19, 40, 72)
    fed = run(tested, inputs, constant=False, precision=precision)
    np.testing.assert_array_equal(fed, run(tested, inputs, precision=precision))
    assert error(fed, definition(tested, inputs)) <= BOUND[precision]


@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_precision_is_fp32_unless_asked_otherwise(tested: Form) -> None:
    inputs = random_inputs(tested, 1, 9, 24, 40)
    np.testing.assert_array_equal(run(tested, inputs), run(tested, inputs, precision="fp32"))


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_rows_do_not_depend_on_batch(tested: Form, precision: str) -> None:
    """They do not depend on threads either: every block sums a row in the same order."""
    inputs = random_inputs(tested, 1, 130, 72, 96)
    whole = run(tested, inputs, precision=precision)
    np.testing.assert_array_equal(run(tested, inputs, precision=precision, threads=1), whole)
    alone = {name: x[:, 77:78] if name in SEQUENCES else x for name, x in inputs.items()}
    np.testing.assert_array_equal(run(tested, alone, precision=precision), whole[:, 77:78])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="float32 where it is not x86-64")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_reduced_precision_is_used(tested: Form, precision: str) -> None:
    inputs = random_inputs(tested, 1, 50, 700, 50)
    assert error_of(tested, inputs, precision=precision) > BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_integer_sums_do_not_overflow(sign: int, precision: str) -> None:
    """All values of a row and a column but one are at the end of their range."""
    inputs = random_inputs(RESIDUAL, 1, 2, 2100, 3)
    inputs["x"][:], inputs["weight"][:] = 1, sign
    inputs["x"][..., 600] = -1
    actual = run(RESIDUAL, inputs, precision=precision)
    assert error(actual, definition(RESIDUAL, inputs)) <= BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("value", [0.0, 1e-3, -300.0])
@pytest.mark.parametrize("width", [1, 16, 513, 700])
def test_constant_rows_are_exact_except_weights(width: int, value: float, precision: str) -> None:
    inputs = random_inputs(RESIDUAL, 1, 3, width, 50)
    inputs["x"][:], inputs["residual"][:], inputs["bias"][:] = value, 0, 0
    actual = run(RESIDUAL, inputs, precision=precision)
    difference = np.abs(actual - definition(RESIDUAL, inputs)).max()
    assert difference <= BOUND[precision] * abs(value) + 1e-25


@pytest.mark.parametrize("tested", NORMED, ids=str)
def test_epsilon(tested: Form) -> None:
    inputs = random_inputs(tested, 1, 9, 24, 40)
    expected = definition(tested, inputs, epsilon=0.5)
    assert error(run(tested, inputs, epsilon=0.5), expected) <= BOUND["fp32"]


@pytest.mark.parametrize("tested", NORMED, ids=str)
def test_a_mean_far_from_zero(tested: Form) -> None:
    inputs = random_inputs(tested, 1, 9, 100, 40)
    inputs["x"] += 1000
    assert error_of(tested, inputs) <= BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_constant_rows_and_zero_weights(tested: Form, precision: str) -> None:
    inputs = random_inputs(tested, 1, 14, 40, 24)
    inputs["x"][:, ::2] = 3.0
    inputs["x"][:, 1] = 0.0
    for name in set(inputs) - {"x", "residual", "norm_bias"}:
        inputs[name][..., ::3] = 0.0
    assert error_of(tested, inputs, precision=precision) <= BOUND[precision]


def test_gelu_is_exact_over_whole_range() -> None:
    """Identity weights and a norm that gives its bias: the output is gelu of every point."""
    points = np.concatenate([np.linspace(-12, 12, 481), [-1e4, -40, 40, 1e4]]).astype(np.float32)
    width = len(points)
    zeros, identity = np.zeros(width, np.float32), np.eye(width, dtype=np.float32)
    inputs = dict.fromkeys(["norm_weight", "bias_in", "bias_out"], zeros)
    inputs |= {"x": zeros[None, None], "norm_bias": points}
    inputs |= {"weight_in": identity, "weight_out": identity}
    actual, exact = run(FEED_FORWARD, inputs)[0, 0], gelu(points.astype(np.float64))
    assert (np.abs(actual - exact) <= 3e-7 * np.maximum(1, np.abs(points))).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((9, 8), np.float32)}, "weight has 9 rows, expected 12"),
        (
            {"weight": np.zeros(12, np.float32)},
            "weight has shape \\[12\\], expected two dimensions",
        ),
        ({"bias": np.zeros(3, np.float32)}, "bias has shape \\[3\\], expected \\[8\\]"),
        (
            {"residual": np.zeros((1, 4, 12), np.float32)},
            "residual has shape \\[1, 4, 12\\], expected \\[1, 4, 8\\]",
        ),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, np.ndarray], message: str) -> None:
    inputs = random_inputs(RESIDUAL, 1, 4, 12, 8) | change
    with pytest.raises(Exception, match=message):
        run(RESIDUAL, inputs)


def test_layer_of_wrong_shape_is_named() -> None:
    """It is one of three layers."""
    inputs = random_inputs(QUERY_KEY_VALUE, 1, 4, 12, 8)
    inputs["key_weight"] = np.zeros((9, 8), np.float32)
    with pytest.raises(Exception, match="key_weight has 9 rows, expected 12"):
        run(QUERY_KEY_VALUE, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_up": (9, 8)}, "weight_up has 9 rows, expected 12"),
        ({"weight_up": (12, 7)}, "weight_up has 7 columns, expected 8"),
        ({"weight_out": (8, 11)}, "weight_out has 11 columns, expected 12"),
        ({"weight_up": None}, "weight_up is absent, expected it beside bias_up"),
        ({"norm_weight": None}, "norm_weight is absent, expected it beside norm_bias"),
    ],
)
def test_parameters_that_do_not_fit_are_named(
    change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    gated = Form("LayerNormFeedForward")
    inputs = random_inputs(gated, 1, 4, 12, 8)
    for name, shape in change.items():
        del inputs[name]
        if shape is not None:
            inputs[name] = np.zeros(shape, np.float32)
    with pytest.raises(Exception, match=message):
        run(gated, inputs)


@pytest.mark.parametrize(("name", "value"), [("norm", "batch"), ("activation", "tanh")])
def test_an_unknown_choice_is_refused(name: str, value: str) -> None:
    inputs = random_inputs(FEED_FORWARD, 1, 4, 12, 8)
    with pytest.raises(Exception, match=f'{name} is "{value}", expected'):
        run(FEED_FORWARD, inputs, **{name: value})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(Exception, match='precision is "int4", expected fp32, bf16 or int8'):
        run(RESIDUAL, random_inputs(RESIDUAL, 1, 4, 12, 8), precision="int4")


@pytest.mark.parametrize("tested", FORMS, ids=str)
def test_no_rows(tested: Form) -> None:
    assert run(tested, random_inputs(tested, 1, 0, 16, 24)).shape[1] == 0
