"""The encoder's operators, as ONNX Runtime runs them, against their definitions in float64."""

import math
import platform

import numpy as np
import pytest
from oracles.mechanisms import layer_norm

from .encoder_runner import BOUND, HALF_BOUND, SEQUENCES, error, outputs, run

OPS = ["LayerNormLinear", "LayerNormQueryKeyValue", "LayerNormFeedForward", "LinearResidual"]
NORM_OPS = OPS[:-1]

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
    op: str, batch: int, tokens: int, width: int, other: int, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    inputs = {"x": normal(batch, tokens, width) + 0.5}
    if op != "LinearResidual":
        inputs |= {"norm_weight": 1 + 0.3 * normal(width), "norm_bias": 0.3 * normal(width)}
    if op == "LayerNormFeedForward":
        inputs |= {"weight_in": normal(width, other) / math.sqrt(width)}
        inputs |= {"weight_out": normal(other, width) / math.sqrt(other)}
        inputs |= {"bias_in": 0.5 * normal(other), "bias_out": 0.5 * normal(width)}
    elif op == "LayerNormQueryKeyValue":
        for name, columns in query_key_value(width, other).items():
            inputs[f"{name}_weight"] = normal(width, columns) / math.sqrt(width)
            inputs[f"{name}_bias"] = 0.5 * normal(columns)
    else:
        inputs |= {"weight": normal(width, other) / math.sqrt(width), "bias": 0.5 * normal(other)}
    if op == "LinearResidual":
        inputs |= {"residual": normal(batch, tokens, other)}
    return inputs


def query_key_value(width: int, other: int) -> dict[str, int]:
    """Return the widths of the outputs, by default all different."""
    return {"query": other, "key": 1 + other // 9, "value": width}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def definition(op: str, inputs: dict[str, np.ndarray], epsilon: float = 1e-5) -> np.ndarray:
    i = {name: x.astype(np.float64) for name, x in inputs.items()}
    if op == "LinearResidual":
        return i["residual"] + i["x"] @ i["weight"] + i["bias"]
    normalized = layer_norm(i["x"], i["norm_weight"], i["norm_bias"], epsilon)
    if op == "LayerNormLinear":
        return normalized @ i["weight"] + i["bias"]
    if op == "LayerNormQueryKeyValue":
        parts = ("query", "key", "value")
        return np.concatenate(
            [normalized @ i[f"{p}_weight"] + i[f"{p}_bias"] for p in parts], axis=-1
        )
    hidden = gelu(normalized @ i["weight_in"] + i["bias_in"])
    return i["x"] + hidden @ i["weight_out"] + i["bias_out"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_operator_equals_definition(op: str, shape: tuple[int, ...], precision: str) -> None:
    inputs = random_inputs(op, *shape)
    assert error(run(op, inputs, precision=precision), definition(op, inputs)) <= BOUND[precision]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_query_key_value_equal_separate_layers(
    shape: tuple[int, ...], precision: str, dtype: type[np.floating]
) -> None:
    inputs = random_inputs("LayerNormQueryKeyValue", *shape)
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    norm = {name: inputs[name] for name in ("x", "norm_weight", "norm_bias")}
    results = outputs("LayerNormQueryKeyValue", inputs, precision=precision)
    for name, result in zip(("query", "key", "value"), results, strict=True):
        alone = norm | {"weight": inputs[f"{name}_weight"], "bias": inputs[f"{name}_bias"]}
        np.testing.assert_array_equal(result, run("LayerNormLinear", alone, precision=precision))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_float16_tensors_match_definition(op: str, shape: tuple[int, ...], constant: bool) -> None:
    inputs = {name: x.astype(np.float16) for name, x in random_inputs(op, *shape).items()}
    actual = run(op, inputs, constant=constant)
    assert actual.dtype == np.float16
    assert error(actual, definition(op, inputs)) <= HALF_BOUND


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("width", [13, 64, 300])
@pytest.mark.parametrize("op", OPS)
def test_nan_inputs_propagate_to_output(op: str, width: int, precision: str) -> None:
    inputs = random_inputs(op, 2, 19, width, 72)
    clean = run(op, inputs, precision=precision)
    inputs["x"][1, 7, width // 2] = np.nan
    result = run(op, inputs, precision=precision)
    assert np.isnan(result[1, 7]).all()
    result[1, 7] = clean[1, 7]
    np.testing.assert_array_equal(result, clean)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("op", OPS)
def test_nan_parameters_propagate_to_output(
    op: str, precision: str, dtype: type[np.floating]
) -> None:
    clean = {name: x.astype(dtype) for name, x in random_inputs(op, 2, 19, 64, 72).items()}
    for name in clean.keys() - SEQUENCES:
        damaged = clean[name].copy()
        damaged.flat[5] = np.nan
        results = outputs(op, clean | {name: damaged}, precision=precision)
        assert any(np.isnan(result).any() for result in results), name


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("op", OPS)
def test_non_constant_weights_give_same_result(op: str, precision: str) -> None:
    inputs = random_inputs(op, 2, 19, 40, 72)
    fed = run(op, inputs, constant=False, precision=precision)
    np.testing.assert_array_equal(fed, run(op, inputs, precision=precision))
    assert error(fed, definition(op, inputs)) <= BOUND[precision]


@pytest.mark.parametrize("op", OPS)
def test_precision_is_fp32_unless_asked_otherwise(op: str) -> None:
    inputs = random_inputs(op, 1, 9, 24, 40)
    np.testing.assert_array_equal(run(op, inputs), run(op, inputs, precision="fp32"))


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("op", OPS)
def test_rows_do_not_depend_on_batch(op: str, precision: str) -> None:
    """They do not depend on threads either: every block sums a row in the same order."""
    inputs = random_inputs(op, 1, 130, 72, 96)
    whole = run(op, inputs, precision=precision)
    np.testing.assert_array_equal(run(op, inputs, precision=precision, threads=1), whole)
    alone = {name: x[:, 77:78] if name in SEQUENCES else x for name, x in inputs.items()}
    np.testing.assert_array_equal(run(op, alone, precision=precision), whole[:, 77:78])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="float32 where it is not x86-64")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("op", OPS)
def test_reduced_precision_is_used(op: str, precision: str) -> None:
    inputs = random_inputs(op, 1, 50, 700, 50)
    assert error(run(op, inputs, precision=precision), definition(op, inputs)) > BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_integer_sums_do_not_overflow(sign: int, precision: str) -> None:
    """All values of a row and a column but one are at the end of their range."""
    inputs = random_inputs("LinearResidual", 1, 2, 2100, 3)
    inputs["x"][:], inputs["weight"][:] = 1, sign
    inputs["x"][..., 600] = -1
    actual = run("LinearResidual", inputs, precision=precision)
    assert error(actual, definition("LinearResidual", inputs)) <= BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("value", [0.0, 1e-3, -300.0])
@pytest.mark.parametrize("width", [1, 16, 513, 700])
def test_constant_rows_are_exact_except_weights(width: int, value: float, precision: str) -> None:
    inputs = random_inputs("LinearResidual", 1, 3, width, 50)
    inputs["x"][:], inputs["residual"][:], inputs["bias"][:] = value, 0, 0
    actual = run("LinearResidual", inputs, precision=precision)
    difference = np.abs(actual - definition("LinearResidual", inputs)).max()
    assert difference <= BOUND[precision] * abs(value) + 1e-25


@pytest.mark.parametrize("op", NORM_OPS)
def test_epsilon(op: str) -> None:
    inputs = random_inputs(op, 1, 9, 24, 40)
    assert error(run(op, inputs, epsilon=0.5), definition(op, inputs, epsilon=0.5)) <= BOUND["fp32"]


@pytest.mark.parametrize("op", NORM_OPS)
def test_a_mean_far_from_zero(op: str) -> None:
    inputs = random_inputs(op, 1, 9, 100, 40)
    inputs["x"] += 1000
    assert error(run(op, inputs), definition(op, inputs)) <= BOUND["fp32"]


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("op", OPS)
def test_constant_rows_and_zero_weights(op: str, precision: str) -> None:
    inputs = random_inputs(op, 1, 14, 40, 24)
    inputs["x"][:, ::2] = 3.0
    inputs["x"][:, 1] = 0.0
    for name in set(inputs) - {"x", "residual", "norm_bias"}:
        inputs[name][..., ::3] = 0.0
    assert error(run(op, inputs, precision=precision), definition(op, inputs)) <= BOUND[precision]


def test_gelu_is_exact_over_whole_range() -> None:
    """Identity weights and a norm that gives its bias: the output is gelu of every point."""
    points = np.concatenate([np.linspace(-12, 12, 481), [-1e4, -40, 40, 1e4]]).astype(np.float32)
    width = len(points)
    zeros, identity = np.zeros(width, np.float32), np.eye(width, dtype=np.float32)
    inputs = dict.fromkeys(["norm_weight", "bias_in", "bias_out"], zeros)
    inputs |= {"x": zeros[None, None], "norm_bias": points}
    inputs |= {"weight_in": identity, "weight_out": identity}
    actual, exact = run("LayerNormFeedForward", inputs)[0, 0], gelu(points.astype(np.float64))
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
    inputs = random_inputs("LinearResidual", 1, 4, 12, 8) | change
    with pytest.raises(Exception, match=message):
        run("LinearResidual", inputs)


def test_layer_of_wrong_shape_is_named() -> None:
    """It is one of three layers."""
    inputs = random_inputs("LayerNormQueryKeyValue", 1, 4, 12, 8)
    inputs["key_weight"] = np.zeros((9, 8), np.float32)
    with pytest.raises(Exception, match="key_weight has 9 rows, expected 12"):
        run("LayerNormQueryKeyValue", inputs)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(Exception, match='precision is "int4", expected fp32, bf16 or int8'):
        run("LinearResidual", random_inputs("LinearResidual", 1, 4, 12, 8), precision="int4")


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    assert run(op, random_inputs(op, 1, 0, 16, 24)).shape[1] == 0
