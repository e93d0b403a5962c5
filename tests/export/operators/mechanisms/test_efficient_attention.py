from collections.abc import Callable

import numpy as np
import pytest

from .cases import ATTRIBUTES, Case, error, make_inputs, variant_of
from .portable import every_form

SOFTMAX = variant_of("EfficientAttention", normalization="softmax")
SCALING = variant_of("EfficientAttention", normalization="scaling")
CAUSAL = variant_of("CausalEfficientAttention", normalization="softmax")
CAUSAL_SCALING = variant_of("CausalEfficientAttention", normalization="scaling")
SCALE = ATTRIBUTES["scale"]


@every_form
def test_values_of_one_give_scale(run: Callable) -> None:
    """Both softmaxes sum to one."""
    for variant in (SOFTMAX, CAUSAL):
        inputs = make_inputs(variant.operator, Case("ones", 70, (70, 25), spread=10))
        inputs["value"][:] = 1
        expected = np.full_like(inputs["value"], SCALE)
        assert error(run(variant, inputs), expected, inputs) < 1e-5


@every_form
def test_constant_on_query_or_key_cancels(run: Callable) -> None:
    """Queries are normalized over their channels and keys over the tokens."""
    inputs = make_inputs(SOFTMAX.operator, Case("axes", 30, (30, 12)))
    rng = np.random.default_rng(0)
    moved = dict(inputs)
    moved["query"] = inputs["query"] + rng.normal(size=(2, 30, 1)).astype(np.float32)
    moved["key"] = inputs["key"] + rng.normal(size=(2, 1, 8)).astype(np.float32)
    for variant in (SOFTMAX, CAUSAL):
        assert error(run(variant, moved, 1), run(variant, inputs, 1), inputs) < 1e-5
    other = inputs | {"key": inputs["key"] + rng.normal(size=(2, 30, 1)).astype(np.float32)}
    assert error(run(SOFTMAX, other, 1), run(SOFTMAX, inputs, 1), inputs) > 1e-2


@every_form
def test_scaling_is_attention_without_softmax(run: Callable) -> None:
    inputs = make_inputs(SCALING.operator, Case("scaling", 70, (70, 70)))
    similarity = inputs["query"] @ inputs["key"].transpose(0, 2, 1).astype(np.float64)
    expected = SCALE * similarity / 70 @ inputs["value"]
    assert error(run(SCALING, inputs, 1), expected, inputs) < 1e-5
    counts = np.arange(1, 71)[:, None]
    expected = SCALE * np.tril(similarity) / counts @ inputs["value"]
    assert error(run(CAUSAL_SCALING, inputs, 1), expected, inputs) < 1e-5


@every_form
def test_scaling_divides_by_counted_keys(run: Callable) -> None:
    inputs = make_inputs(SCALING.operator, Case("counting", 12, (12, 5)))
    for name in ("query", "key", "value"):
        inputs[name][:] = 1
    for variant in (SCALING, CAUSAL_SCALING):
        result = run(variant, inputs, 1)
        assert result[0] == pytest.approx(8 * SCALE)
        assert result[1, :5] == pytest.approx(8 * SCALE)


@every_form
def test_heads_do_not_mix(run: Callable) -> None:
    for variant in (SOFTMAX, SCALING, CAUSAL, CAUSAL_SCALING):
        inputs = make_inputs(variant.operator, Case("heads", 40, (40, 25)))
        own = {n: x[..., :4].copy() if x.ndim == 3 else x for n, x in inputs.items()}
        assert error(run(variant, inputs, 2)[..., :4], run(variant, own, 1), own) < 1e-6
