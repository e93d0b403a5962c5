"""The collapsed Fastformer layer, as ONNX Runtime runs it, against the layer in float64."""

import math
from typing import Any

import numpy as np
import pytest
from oracles.mechanisms import fastformer, layer_norm

from .encoder_runner import BOUND, HALF_BOUND, error, run

OP = "LayerNormFastformer"

# batch, tokens, width, heads: more tokens than the width fold a matrix per document, fewer do not.
SHAPES = [
    (1, 1, 1, 1),
    (1, 2, 1, 1),
    (2, 3, 12, 4),
    (2, 31, 12, 3),
    (3, 33, 17, 1),
    (1, 7, 64, 8),
    (3, 65, 64, 64),
    (1, 600, 48, 2),
    (2, 290, 272, 8),
    (2, 40, 272, 16),
    (1, 520, 515, 5),
]


def random_layer(
    width: int, heads: int, seed: int = 0, magnitude: float = 1.0
) -> dict[str, np.ndarray]:
    """Draw weights of the layer as written; `magnitude` is about that of the logits."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    layer = {"norm_weight": 1 + 0.3 * normal(width), "norm_bias": 0.3 * normal(width)}
    for name in ("query", "key", "output"):
        layer |= {f"{name}_weight": normal(width, width) / math.sqrt(width)}
        layer |= {f"{name}_bias": 0.5 * normal(width)}
    for name in ("alpha", "beta"):
        layer |= {name: normal(width, heads) * magnitude / math.sqrt(heads)}
    return layer


def documents(
    batch: int, tokens: int, width: int, lengths: list[int] | None = None, seed: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((batch, tokens, width), dtype=np.float32) + 0.5
    return x, np.full(batch, tokens) if lengths is None else np.asarray(lengths)


def operator_inputs(
    layer: dict[str, np.ndarray], x: np.ndarray, lengths: np.ndarray
) -> dict[str, np.ndarray]:
    heads = layer["alpha"].shape[1]
    scale = (x.shape[2] / heads) ** -0.5
    query_weight = layer["query_weight"].astype(np.float64)
    return {
        "x": x,
        **{name: layer[name] for name in ("norm_weight", "norm_bias", "query_weight")},
        **{name: layer[name] for name in ("query_bias", "key_weight", "key_bias")},
        "alpha_weight": (query_weight @ layer["alpha"] * scale).astype(x.dtype),
        "beta_weight": (layer["beta"] * scale).astype(x.dtype),
        "weight": layer["output_weight"],
        "bias": layer["output_bias"],
        "lengths": lengths,
    }


def definition(layer: dict[str, np.ndarray], x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    i = {name: values.astype(np.float64) for name, values in layer.items()}
    x = x.astype(np.float64)
    normed = layer_norm(x, i["norm_weight"], i["norm_bias"], 1e-5)
    query = normed @ i["query_weight"] + i["query_bias"]
    key = normed @ i["key_weight"] + i["key_bias"]
    inputs = {"query": query, "key": key, "value": query, "lengths": lengths}
    inputs |= {"alpha_weight": i["alpha"], "beta_weight": i["beta"]}
    mixed = fastformer(inputs, num_heads=i["alpha"].shape[1])
    return x + mixed @ i["output_weight"] + i["output_bias"] + query


def run_layer(
    layer: dict[str, np.ndarray], x: np.ndarray, lengths: np.ndarray, **options: Any
) -> np.ndarray:
    heads = layer["alpha"].shape[1]
    return run(OP, operator_inputs(layer, x, lengths), num_heads=heads, **options)


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_layer_as_written(shape: tuple[int, ...], precision: str) -> None:
    layer, given = random_layer(shape[2], shape[3]), documents(*shape[:3])
    actual = run_layer(layer, *given, precision=precision)
    assert error(actual, definition(layer, *given)) <= BOUND[precision]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float16_tensors_match_layer(shape: tuple[int, ...]) -> None:
    layer = {name: x.astype(np.float16) for name, x in random_layer(*shape[2:]).items()}
    x, lengths = documents(*shape[:3])
    actual = run_layer(layer, x.astype(np.float16), lengths)
    assert actual.dtype == np.float16
    # The logits' weights are one product as float16, too: twice the bound.
    assert error(actual, definition(layer, x.astype(np.float16), lengths)) <= 2 * HALF_BOUND


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tokens", [20, 300])
def test_nan_inputs_propagate_to_output(tokens: int, precision: str) -> None:
    layer = random_layer(24, 4)
    x, lengths = documents(3, tokens, 24, [tokens, tokens - 1, 7])
    clean = run_layer(layer, x, lengths, precision=precision)
    x[1, 5, 3] = np.nan
    result = run_layer(layer, x, lengths, precision=precision)
    assert np.isnan(result[1, : tokens - 1]).all()
    np.testing.assert_array_equal(result[::2], clean[::2])


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tokens", [20, 300])
def test_padding_does_not_count(tokens: int, precision: str) -> None:
    layer = random_layer(24, 4)
    x, lengths = documents(4, tokens, 24, [tokens, tokens - 1, 1, 7])
    counts = np.arange(tokens) < lengths[:, None]
    noisy = np.where(counts[..., None], x, 1e4 * np.sin(np.arange(x.size)).reshape(x.shape))
    actual = run_layer(layer, noisy.astype(np.float32), lengths, precision=precision)
    expected = definition(layer, x, lengths)
    assert np.isfinite(actual).all()
    assert error(actual[counts], expected[counts]) <= BOUND[precision]


@pytest.mark.parametrize("tokens", [5, 50])
@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [-2, 1000]])
def test_empty_documents_and_excessive_lengths(tokens: int, lengths: list[int]) -> None:
    layer = random_layer(16, 2)
    x, lengths = documents(2, tokens, 16, lengths)
    actual = run_layer(layer, x, lengths)
    assert np.isfinite(actual).all()
    counts = np.arange(tokens) < np.clip(lengths, 0, tokens)[:, None]
    if counts.any():
        assert error(actual[counts], definition(layer, x, lengths)[counts]) <= BOUND["fp32"]


@pytest.mark.parametrize("magnitude", [20.0, 100.0])
@pytest.mark.parametrize("tokens", [20, 700])
def test_logits_far_from_zero(tokens: int, magnitude: float) -> None:
    """One token takes nearly all the weight; a logit of 100 is rounded by 1e-5."""
    layer, given = random_layer(32, 4, magnitude=magnitude), documents(2, tokens, 32)
    assert error(run_layer(layer, *given), definition(layer, *given)) <= 100 * BOUND["fp32"]


def test_logits_beyond_range_of_exponential() -> None:
    layer, given = random_layer(32, 4, magnitude=1e6), documents(2, 300, 32)
    assert np.isfinite(run_layer(layer, *given)).all()


def test_default_is_one_head() -> None:
    layer, given = random_layer(16, 1), documents(1, 20, 16)
    unsaid = run(OP, operator_inputs(layer, *given))
    np.testing.assert_array_equal(unsaid, run_layer(layer, *given))


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("tokens", [20, 700])
def test_threads_and_constness_change_nothing(tokens: int, precision: str) -> None:
    layer, given = random_layer(48, 4), documents(2, tokens, 48)
    whole = run_layer(layer, *given, precision=precision)
    options = {"precision": precision}
    np.testing.assert_array_equal(run_layer(layer, *given, threads=1, **options), whole)
    np.testing.assert_array_equal(run_layer(layer, *given, constant=False, **options), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_weight": np.zeros((9, 12), np.float32)}, "query_weight has shape \\[9, 12\\]"),
        ({"weight": np.zeros((12, 8), np.float32)}, "weight has 8 columns, expected 12"),
        ({"alpha_weight": np.zeros((12, 2), np.float32)}, "alpha_weight has shape \\[12, 2\\]"),
        ({"lengths": np.zeros(3, np.int64)}, "lengths has shape \\[3\\], expected \\[1\\]"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, np.ndarray], message: str) -> None:
    inputs = operator_inputs(random_layer(12, 4), *documents(1, 5, 12)) | change
    with pytest.raises(Exception, match=message):
        run(OP, inputs, num_heads=4)


def test_heads_must_divide_width() -> None:
    inputs = operator_inputs(random_layer(12, 4), *documents(1, 5, 12))
    with pytest.raises(Exception, match="not divisible by num_heads 5"):
        run(OP, inputs, num_heads=5)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    assert run_layer(random_layer(12, 4), *documents(*shape, 12)).shape == (*shape, 12)
